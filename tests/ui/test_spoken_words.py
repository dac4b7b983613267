"""The words of a speech on the page: they light up while nano says them, and play when they are chosen."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from shoal.checkpoint.find import BUNDLED_DIRECTORY
from tests.firefox import ARROW_RIGHT, ENTER, firefox
from tests.server.conftest import Serving, start
from tests.ui.conftest import Visit
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(not (BUNDLED_DIRECTORY / "config.json").exists(), reason="nano is not in the package")

TEXT = "🐟 It costs $12.50 now."
WORDS = ["It", "costs", "$12.50", "now."]
SEED = 3
# A clock that only the test moves, loudspeakers without delay, and a gate that holds the stream after its first words.
UNDER_CONTROL = """() => {
  window.now = 1;
  Object.defineProperty(BaseAudioContext.prototype, "currentTime", { get: () => window.now });
  Object.defineProperty(AudioContext.prototype, "outputLatency", { get: () => 0 });
  let open;
  const gate = new Promise((resolve) => (open = resolve));
  window.openGate = open;
  window.gated = true;
  const { fetch } = window;
  window.fetch = async (url, options) => {
    const response = await fetch(url, options);
    if (!window.gated || !String(url).endsWith("with-timestamp")) return response;
    let words = 0;
    const hold = new TransformStream({
      async transform(piece, controller) {
        controller.enqueue(piece);
        words += new TextDecoder().decode(piece).split('"first":').length - 1;
        if (words >= 3) await gate; // the audio of the second word is there
      },
    });
    return new Response(response.body.pipeThrough(hold), response);
  };
}"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    served = start(tmp_path_factory.mktemp("nano"), model="nano", slots=2)
    yield served
    assert served.end() == 0, served.log.read_text()


def times_by_server(serving: Serving, **fields: object) -> list[tuple[float, float]]:
    """Return start and end of each word in seconds, and check that they are those of TEXT."""
    body = {"text": TEXT, "seed": SEED, "format": "pcm", **fields}
    url = f"{serving.url}/v1/tts/stream/with-timestamp"
    answer = httpx.post(url, json=body, timeout=240, trust_env=False, verify=False).raise_for_status()
    events = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    assert sum(len(base64.b64decode(event["audio_base64"])) for event in events) > 0
    segments = [
        (event["chunk_audio_offset_sec"], segment)
        for event in events
        if event["alignment"]
        for segment in event["alignment"]["segments"]
    ]
    assert [TEXT[segment["first"] : segment["last"]] for _, segment in segments] == WORDS
    return [(offset + segment["start"], offset + segment["end"]) for offset, segment in segments]


def say(page: "Page", text: str = TEXT) -> None:
    page.fill("#text", text)
    page.evaluate("document.getElementById('advanced').open = true")
    page.fill("#seed", str(SEED))
    page.click("#speak")


def figure(page: "Page", name: str) -> int:
    return int(page.get_attribute("#playback", f"data-{name}") or 0)


def wait_until_made(page: "Page") -> None:
    page.wait_for_selector("#speak:not(.busy):enabled")
    wait_until(lambda: figure(page, "samples") > 0, interval=0.1)


def move_to(page: "Page", seconds: float) -> None:
    """Let playback, which has just begun at the first sample, reach a second of the audio."""
    page.evaluate("(seconds) => (window.now = window.began + 0.06 + seconds)", seconds)


def begin(page: "Page") -> None:
    """Let the next playback begin now."""
    page.evaluate("window.now += 100; window.began = window.now")


def lit(page: "Page", word: str) -> None:
    page.wait_for_function(
        "(word) => [...document.querySelectorAll('.word[aria-current]')].map((n) => n.textContent).join() === word",
        arg=word,
    )


def drawn(page: "Page") -> list[str]:
    return page.locator("#words .word").all_inner_texts()


def middle(times: tuple[float, float]) -> float:
    return sum(times) / 2


def test_words_light_up_while_the_speech_is_streamed_and_after_a_reload(visit: Visit, serving: Serving) -> None:
    times = times_by_server(serving)
    page = visit(f"{serving.url}/v1/health", ready=False)
    page.add_init_script(f"({UNDER_CONTROL})()")
    page.goto(serving.url)
    page.wait_for_selector("#speak:enabled")
    begin(page)
    say(page)
    page.wait_for_selector("#words .word >> nth=2")
    assert page.is_visible("#speak.busy"), "the gate holds the stream"
    move_to(page, middle(times[1]))
    lit(page, "costs")
    page.evaluate("window.openGate()")
    wait_until_made(page)
    assert drawn(page) == WORDS
    for word, span in zip(WORDS, times, strict=True):
        move_to(page, middle(span))
        lit(page, word)
    assert page.evaluate("document.querySelector('#words').innerText") == TEXT
    assert page.locator("#words").evaluate("(node) => node.closest('[aria-live], [role=status], [role=alert]')") is None

    page.wait_for_selector("#history .speech")
    page.reload()
    page.wait_for_selector("#speak:enabled")
    assert page.is_hidden("#words")
    begin(page)
    page.click("[aria-label^='Play: ']")
    page.wait_for_selector("#playback[data-state=playing]")
    move_to(page, middle(times[2]))
    lit(page, "$12.50")
    assert drawn(page) == WORDS


def test_a_chosen_word_plays_from_there(visit: Visit, serving: Serving) -> None:
    page = visit(viewport={"width": 1280, "height": 720})
    page.evaluate(f"({UNDER_CONTROL})(); window.gated = false")
    rate = 0

    def plays_from(second: float) -> None:
        page.wait_for_selector("#playback[data-state=playing]")
        wait_until(lambda: figure(page, "played") == round(second * rate), interval=0.05)

    page.fill("#speed", "1.5")
    times = times_by_server(serving, prosody={"speed": 1.5, "volume": 0})
    say(page)
    wait_until_made(page)
    rate = figure(page, "rate")
    shown = page.locator("#play").bounding_box()
    assert shown
    assert shown["y"] + shown["height"] <= 720, "the player stays in view with the words"
    page.click("#words .word >> text=$12.50")
    plays_from(times[2][0])
    lit(page, "$12.50")
    page.click("#play")
    page.wait_for_selector("#playback[data-state=paused]")
    page.click("#words .word >> text=now.")
    plays_from(times[3][0])
    page.focus("#words")
    for key in ("Home", "ArrowRight"):
        page.keyboard.press(key)
    pointed: Any = page.get_attribute("#words", "aria-activedescendant")
    assert page.inner_text(f"#{pointed}") == "costs"
    assert page.locator("#words [aria-selected=true]").all_inner_texts() == ["costs"]
    page.keyboard.press("Enter")
    plays_from(times[1][0])
    assert page.locator("#words[tabindex='0'], #words [tabindex]").count() == 1, "the words are one tab stop"


def test_nano_speaks_with_a_builtin_voice(visit: Visit) -> None:
    page = visit()
    assert page.locator("#voices >> text=Built in").count() > 0
    assert page.locator(".voice input:checked").get_attribute("value")
    say(page, "Hello.")
    wait_until_made(page)
    assert 0.2 < figure(page, "samples") / figure(page, "rate") < 10
    assert page.locator("#voices [aria-label^=Edit]").count() == 0


MARKED = "[...document.querySelectorAll('.word[aria-current]')].map((word) => word.textContent).join()"
STATE = "document.querySelector('#playback').dataset.state"


def test_firefox_plays_to_the_last_sample_lights_words_up_and_keeps_them(serving: Serving, tmp_path: Path) -> None:
    times = times_by_server(serving)
    with firefox(tmp_path / "profile") as tab:
        # Without a sound card Firefox does not move its clock.
        tab.before_every_page(f"() => {{ ({UNDER_CONTROL})(); window.gated = false; }}")
        tab.open(serving.url)
        tab.wait_for("!document.querySelector('#speak').disabled")
        for field, value in (("text", TEXT), ("seed", str(SEED))):
            tab.run(f"document.querySelector('#{field}').value = {json.dumps(value)}")
            tab.run(f"document.querySelector('#{field}').dispatchEvent(new Event('input'))")
        tab.run("window.began = window.now")
        tab.click("#speak")
        tab.wait_for("document.querySelector('.speech')")
        for word, span in zip(WORDS, times, strict=True):
            tab.run(f"window.now = window.began + 0.06 + {middle(span)}")
            tab.wait_for(f"{MARKED} === {json.dumps(word)}")
        tab.run("window.now += 100")
        tab.wait_for(f"{STATE} === 'ended'")
        made = tab.run("document.querySelector('#playback').dataset")
        assert int(made["samples"]) == int(made["played"]) > times[-1][0] * int(made["rate"])

        tab.reload()
        tab.click("[aria-label^='Play: ']")
        tab.wait_for(f"{STATE} === 'playing'")
        assert tab.run("[...document.querySelectorAll('.word')].map((word) => word.textContent)") == WORDS
        tab.click("#word-0-1")
        tab.wait_for(f"{MARKED} === 'costs'")
        tab.press(ARROW_RIGHT, ENTER)
        tab.wait_for(f"{MARKED} === '$12.50'")
