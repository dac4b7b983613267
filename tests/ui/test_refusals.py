"""The page when the browser, the server or the user refuses: microphone, key, voice, a stopped file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.conftest import Serving, start
from tests.ui.conftest import Visit
from tests.ui.test_page import LONG, SHORT, add_voice, http_request, playback, save_voice, say, wait_until_made
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
# Collects the microphone's streams; the browser grants them when the test says so.
ASK_FOR_MICROPHONE = """() => {
  const { getUserMedia } = MediaDevices.prototype;
  window.streams = [];
  window.granted = new Promise((resolve) => (window.grant = () => void resolve()));
  MediaDevices.prototype.getUserMedia = async function (wanted) {
    await window.granted;
    const stream = await getUserMedia.call(this, wanted);
    window.streams.push(stream);
    return stream;
  };
}"""
REFUSE_MICROPHONE = """(name) => {
  MediaDevices.prototype.getUserMedia = async () => { throw new DOMException("", name); };
}"""
# Drops a file, or a text, on the page; returns whether the browser is kept from opening it.
DROP = """(file) => {
  const dataTransfer = new DataTransfer();
  if (file) dataTransfer.items.add(new File(["RIFF"], "me.wav"));
  else dataTransfer.setData("text/plain", "me");
  return !document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""
FOCUSED = "() => [document.activeElement.getAttribute('aria-label'), document.activeElement.id]"
# The state of the microphone's tracks, "live" or "ended".
TRACKS = "() => window.streams.flatMap((stream) => stream.getTracks()).map(({ readyState }) => readyState)"
BREAK_WORKLETS = (
    "() => { AudioWorklet.prototype.addModule = async () => { throw new DOMException('', 'AbortError'); }; }"
)


def wait_until_off(page: "Page") -> None:
    wait_until(lambda: page.evaluate(TRACKS) == ["ended"], interval=0.05)


def start_recording(page: "Page") -> None:
    page.evaluate(ASK_FOR_MICROPHONE)
    page.evaluate("window.grant()")
    page.click("#add-voice")
    page.click("#record")
    wait_until(lambda: page.inner_text("#record-clock") >= "0:01", interval=0.1)


def test_a_problem_is_in_view_wherever_the_page_is_scrolled(visit: Visit) -> None:
    page = visit(**PHONE)
    page.route("**/v1/tts", lambda route: route.fulfill(status=503, json={"message": "the queue is full"}))
    page.fill("#text", LONG)
    page.evaluate("document.querySelector('footer').scrollIntoView()")
    page.evaluate("document.getElementById('speak').click()")
    page.wait_for_selector("#notice >> text=The queue is full.")
    shown = page.locator("#notice").bounding_box()
    assert shown
    assert shown["y"] >= 0
    page.locator("#notice-close").press("Enter")
    assert page.evaluate(FOCUSED)[1] == "speak"


def test_the_buttons_of_the_player_are_in_one_row_on_a_phone(visit: Visit) -> None:
    page = visit(**PHONE)
    boxes = [page.locator(name).bounding_box() for name in ("#play", "#download summary", "#share")]
    middles = [box["y"] + box["height"] / 2 for box in boxes if box]
    assert len(middles) == 3
    assert max(middles) - min(middles) < 4


def test_the_microphone_goes_off_if_the_dialog_was_closed_while_the_browser_asked(visit: Visit) -> None:
    page = visit()
    page.evaluate(ASK_FOR_MICROPHONE)
    page.click("#add-voice")
    page.click("#record")
    page.click("#record")  # opens no second stream
    page.keyboard.press("Escape")
    page.evaluate("window.grant()")
    wait_until_off(page)
    assert page.get_attribute("#record", "aria-pressed") == "false"


def test_the_microphone_goes_off_when_a_file_is_preferred(visit: Visit) -> None:
    page = visit()
    start_recording(page)
    page.check("input[value=upload]")
    wait_until_off(page)
    assert page.is_hidden("#recording-preview")


def test_the_microphone_goes_off_when_the_browser_cannot_record(visit: Visit) -> None:
    page = visit()
    page.evaluate(ASK_FOR_MICROPHONE)
    page.evaluate("window.grant()")
    page.evaluate(BREAK_WORKLETS)
    page.click("#add-voice")
    page.click("#record")
    page.wait_for_selector("#voice-error >> text=The browser cannot record here. Reload the page, or upload a file.")
    wait_until_off(page)


def test_a_file_dropped_on_the_page_does_not_replace_it(visit: Visit) -> None:
    page = visit()
    assert page.evaluate(DROP, True)
    assert not page.evaluate(DROP, False), "a text can be dropped into the text field"


def test_the_findings_of_a_recording_are_sentences(visit: Visit) -> None:
    page = visit()
    report = {"seconds": 9, "level_db": -20, "noise_db": -60, "findings": [{"message": "are words missing?"}]}
    page.route("**/v1/references/check*", lambda route: route.fulfill(json=report))
    page.click("#add-voice")
    page.check("input[value=upload]")
    page.set_input_files("#recording-file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": b"RIFF"})
    page.wait_for_selector("#recording-check[data-state=findings]")
    assert page.inner_text("#recording-check li") == "Are words missing?"


def test_save_ends_the_recording(visit: Visit, serving: Serving) -> None:
    page = visit()
    start_recording(page)
    page.fill("#voice-name", "saved at once")
    page.click("#save-voice")
    wait_until_off(page)
    save_voice(page)
    page.wait_for_selector(".voice[data-name='saved at once']")
    http_request(serving, "DELETE", "/v1/references/delete", {"reference_id": "saved at once"})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NotAllowedError", "The microphone is not allowed."),
        ("NotFoundError", "No microphone was found."),
        ("NotReadableError", "The microphone cannot be opened. Another program may be using it."),
    ],
)
def test_a_refused_microphone_has_a_reason(visit: Visit, name: str, reason: str) -> None:
    page = visit()
    page.evaluate(REFUSE_MICROPHONE, name)
    page.click("#add-voice")
    page.click("#record")
    page.wait_for_selector(f"#voice-error >> text={reason}")


def test_a_key_dialog_that_was_closed_stays_closed_until_it_is_asked_for(visit: Visit, tmp_path: Path) -> None:
    served = start(tmp_path / "keyed", api_keys="a-key-of-our-own-1", slots=2)
    try:
        page = visit(served.url, ready=False)
        page.wait_for_selector("#key-error >> text=This server asks for a key")
        page.keyboard.press("Escape")
        page.wait_for_selector("#notice >> text=This server asks for a key")
        for _ in range(3):  # the page looks at the server three times more
            with page.expect_response("**/ready"):
                pass
        assert page.is_hidden("#key-dialog")
        page.click("#notice-action")
        page.fill("#key", "ключ")  # which no header can carry
        page.keyboard.press("Enter")
        assert page.is_visible("#key-dialog")
        assert page.evaluate("document.getElementById('key').validity.patternMismatch")
        page.fill("#key", " a-key-of-our-own-1 ")
        page.keyboard.press("Enter")
        page.wait_for_selector("#speak:enabled")
        assert page.is_hidden("#notice")
    finally:
        served.end()


def test_a_failure_that_was_dismissed_is_not_shown_again_by_the_polling(visit: Visit) -> None:
    page = visit()
    page.route("**/v1/about", lambda route: route.fulfill(status=500, json={"message": "the disk is full"}))
    page.reload()
    page.wait_for_selector("#notice >> text=The disk is full.")
    page.click("#notice-close")
    for _ in range(3):
        with page.expect_response("**/v1/about"):
            pass
    assert page.is_hidden("#notice")


def test_a_voice_that_was_deleted_elsewhere_leaves_the_list(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    add_voice(page, "short lived", recording)
    page.wait_for_selector("[data-name='short lived'] input:checked", state="attached")
    http_request(serving, "DELETE", "/v1/references/delete", {"reference_id": "short lived"})
    say(page)
    page.wait_for_selector("#notice >> text=There is no voice 'short lived'.")
    assert page.is_hidden("#notice-action"), "the same request would fail again"
    page.wait_for_selector("[data-name='short lived']", state="detached")


def test_escape_clears_the_search_before_it_stops_the_speech(visit: Visit) -> None:
    page = visit()
    page.route("**/v1/tts", lambda route: None)  # never answered
    page.evaluate("document.getElementById('voice-search').hidden = false")
    say(page)
    page.fill("#voice-search", "nobody")
    page.keyboard.press("Escape")
    assert page.input_value("#voice-search") == ""
    assert page.is_hidden("#voices-none")
    assert page.inner_text("#speak-label") == "Stop"
    page.keyboard.press("Escape")
    page.wait_for_selector("#speak:not(.busy)")


def test_a_file_is_not_lost_by_leaving_the_page_and_can_be_saved_when_it_was_stopped(visit: Visit) -> None:
    page = visit()
    page.fill("#text", "word " * 4_000)
    asked: list[str] = []
    silence: dict[str, Any] = {
        "body": bytes(32_000),
        "headers": {"X-Sample-Rate": "16000", "Content-Type": "audio/pcm"},
    }

    def answer_twice(route: "Route") -> None:
        asked.append("")
        if len(asked) <= 2:
            route.fulfill(status=200, **silence)

    page.route("**/v1/tts", answer_twice)
    page.click("#speak")
    page.click("text=Make a file")
    page.wait_for_selector("#progress-words >> text=Part 3 of ")
    wait_until(lambda: page.is_visible("#speak") and len(asked) == 3, interval=0.05)
    asked_to_stay: list[str] = []
    page.once("dialog", lambda dialog: (asked_to_stay.append(dialog.type), dialog.dismiss()))
    page.evaluate("void location.reload()")
    wait_until(lambda: page.is_visible("#speak") and asked_to_stay == ["beforeunload"], interval=0.05)
    page.keyboard.press("Escape")
    page.wait_for_selector("#notice >> text=2.0 s of audio is ready.")
    with page.expect_download() as download:
        page.click("text=Save it")
    assert len(Path(download.value.path()).read_bytes()) == 44 + 2 * 32_000
    assert playback(page, "samples") == 0


def test_the_focus_stays_in_the_list_when_an_entry_is_deleted(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    for text in (SHORT, f"{SHORT} {SHORT}"):
        say(page, text)
        wait_until_made(page)
    wait_until(lambda: page.locator("#history .speech").count() == 2, interval=0.05)
    for near in (f"Delete: {SHORT}", None):
        page.locator("#history [aria-label^=Delete]").first.press("Enter")
        wait_until(lambda near=near: page.evaluate(FOCUSED)[0] == near, interval=0.05)
    assert page.evaluate(FOCUSED)[1] == "speak"
    add_voice(page, "brief", recording)
    page.focus("[aria-label='Edit brief']")
    page.keyboard.press("Enter")
    page.click("#delete-voice")
    page.click("#delete-voice")
    page.wait_for_selector("[data-name=brief]", state="detached")
    wait_until(lambda: page.evaluate("document.activeElement.name") == "voice", interval=0.05)


def test_the_download_menu_closes_when_the_focus_leaves_it(visit: Visit) -> None:
    page = visit()
    say(page)
    wait_until_made(page)
    page.locator("#download summary").press("Enter")
    assert page.locator("#download[open]").count() == 1
    page.locator("#formats button").last.focus()
    assert page.locator("#download[open]").count() == 1
    page.keyboard.press("Tab")
    assert page.locator("#download[open]").count() == 0


def test_the_focus_stays_in_the_cast_when_no_speaker_can_be_added(visit: Visit) -> None:
    page = visit()
    page.check("input[value=dialogue]")
    for _ in range(4):
        page.locator("#add-speaker").press("Enter")
    assert page.is_hidden("#add-speaker")
    assert page.evaluate("document.activeElement.closest('.cast-row').textContent").startswith("Speaker 6")


def test_the_history_asks_before_it_deletes_several_speeches(visit: Visit) -> None:
    page = visit()
    for text in (SHORT, f"{SHORT} {SHORT}"):
        say(page, text)
        wait_until_made(page)
    wait_until(lambda: page.locator("#history .speech").count() == 2, interval=0.05)
    page.click("#clear-history")
    page.wait_for_selector("#clear-history >> text=Delete all 2?")
    page.focus("#text")
    page.wait_for_selector("#clear-history >> text=Clear")
    assert page.locator("#history .speech").count() == 2
    page.click("#clear-history")
    page.click("#clear-history")
    page.wait_for_selector("#history-empty", state="visible")
