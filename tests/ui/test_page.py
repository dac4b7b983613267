"""The web page in a browser: speak, stop, choose voices, record, reload."""

import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from shoal.audio.decode import AudioLimits, read_audio
from tests.server.conftest import ROOT, Serving, command, engine_of, slowed, start, surroundings
from tests.ui.conftest import MAX_FRAMES, Visit
from tests.waiting import TIMEOUT_SECONDS, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

SHORT = "The tide is coming in."
LONG = " ".join(f"Wave number {number} rolls over the sand and goes back to the sea." for number in range(60))
SEED = 44  # with which the tiny random model says the short text in 0.9 seconds
VOICE_SEED = 23  # with which it says the texts of the tests with voices in about two seconds


NAMELESS = """() => {
  const pressable = "button, input, select, textarea, [role=slider], summary, a";
  const name = (node) => node.getAttribute("aria-label") || node.textContent || node.labels?.[0]?.textContent || "";
  const nameless = (node) => !node.hidden && !name(node).trim();
  return [...document.querySelectorAll(pressable)].filter(nameless).map((node) => node.outerHTML);
}"""


def say(page: "Page", text: str = SHORT, seed: int | None = SEED) -> None:
    page.fill("#text", text)
    choose_seed(page, seed)
    page.click("#speak")


def choose_seed(page: "Page", seed: int | None) -> None:
    page.evaluate("document.getElementById('advanced').open = true")
    page.fill("#seed", "" if seed is None else str(seed))


def wait_until_made(page: "Page") -> None:
    page.wait_for_selector("#speak:not(.busy):enabled")
    wait_until(lambda: playback(page, "samples") > 0, interval=0.1)


def wait_until_heard(page: "Page") -> None:
    page.wait_for_selector("#playback[data-state=ended]")


def playback(page: "Page", name: str) -> int:
    return int(page.get_attribute("#playback", f"data-{name}") or 0)


def spoken_by_server(url: str, text: str = SHORT, **fields: object) -> np.ndarray:
    body = {"text": text, "seed": SEED, "format": "pcm", "streaming": True, "max_new_tokens": MAX_FRAMES, **fields}
    answer = httpx.post(f"{url}/v1/tts", json=body, timeout=240, trust_env=False, verify=False).raise_for_status()
    return np.frombuffer(answer.content, "<i2")


def downloaded(page: "Page", format: str) -> bytes:
    page.click("#download summary")
    with page.expect_download() as download:
        page.click(f"[data-format={format}]")
    assert download.value.suggested_filename == f"shoal.{format}"
    return Path(download.value.path()).read_bytes()


def samples_of(audio: bytes, rate: int = 16_000) -> np.ndarray:
    return read_audio(io.BytesIO(audio), rate, AudioLimits(min_seconds=0.0)).samples


def http_post(serving: Serving, path: str, **options: Any) -> None:
    httpx.post(f"{serving.url}{path}", trust_env=False, verify=False, **options).raise_for_status()


def http_request(serving: Serving, method: str, path: str, body: object) -> None:
    httpx.request(method, f"{serving.url}{path}", json=body, trust_env=False, verify=False).raise_for_status()


def figure(serving: Serving, name: str) -> float:
    """Return a metric, summed over its labels."""
    text = httpx.get(f"{serving.url}/metrics", trust_env=False, verify=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def add_voice(page: "Page", name: str, recording: bytes) -> None:
    page.click("#add-voice")
    page.check("input[value=upload]")
    page.set_input_files("#recording-file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": recording})
    page.fill("#transcript", "What I say in it.")
    page.fill("#voice-name", name)
    save_voice(page)
    page.wait_for_selector("#voice-dialog", state="hidden")


def save_voice(page: "Page") -> None:
    """Save in spite of what was found: the recordings of the tests are short tones."""
    page.wait_for_selector("#recording-check[data-state=findings]")
    page.click("text=Save anyway")


def test_typed_text_is_played_to_its_last_sample(visit: Visit, serving: Serving) -> None:
    page = visit()
    say(page)
    wait_until_made(page)
    wait_until_heard(page)
    expected = spoken_by_server(serving.url)
    assert (playback(page, "samples"), playback(page, "rate")) == (len(expected), 16_000)
    assert playback(page, "played") == len(expected)
    # The last bit may differ: chunk boundaries depend on timing.
    heard = np.frombuffer(downloaded(page, "wav")[44:], "<i2")
    assert np.abs(heard.astype(int) - expected).max() <= 1
    assert page.inner_text("#first-audio").endswith(("ms", " s"))
    assert float(page.inner_text("#rtf")) > 0
    assert page.inner_text("#seed-used") == str(SEED)
    assert page.is_hidden("#words"), "this model has no word times"


def test_a_model_that_has_lost_its_word_times_speaks_without_them(visit: Visit, serving: Serving) -> None:
    """The page was loaded before the server got a model whose heads are not known."""
    page = visit()
    page.route("**/v1/about", lambda route: route.fulfill(json=route.fetch().json() | {"word_times": True}))
    page.reload()
    page.wait_for_selector("#speak:enabled")
    with page.expect_response("**/v1/tts/stream/with-timestamp") as refused:
        say(page)
    assert (refused.value.status, "shoal align calibrate" in refused.value.text()) == (400, True)
    wait_until_made(page)
    assert playback(page, "samples") == len(spoken_by_server(serving.url))
    assert page.is_hidden("#words")
    assert page.is_hidden("#notice")


def test_a_long_text_plays_while_it_is_generated_and_stop_frees_the_slot(visit: Visit, slow_serving: Serving) -> None:
    page = visit(slow_serving.url, limit=False)
    counter = 'shoal_requests_total{api="fish",outcome="disconnected"}'
    left = figure(slow_serving, counter)
    with slowed(engine_of(slow_serving)):
        say(page, LONG, seed=10)
        wait_until(lambda: playback(page, "played") > 8000, interval=0.1)
        assert page.is_visible("#speak.busy")
        assert page.inner_text("#hint").split() == ["Esc", "stops"]
        assert page.inner_text("#progress-words").startswith("Part ")
        wait_until(lambda: figure(slow_serving, "shoal_engine_running") == 1, interval=0.1)
        page.click("#speak")
        page.wait_for_selector("#speak:not(.busy)")
    wait_until(lambda: figure(slow_serving, "shoal_engine_running") == 0, interval=0.1)
    # Counted when the response has ended, which may be after the slot was freed.
    wait_until(lambda: figure(slow_serving, counter) == left + 1, interval=0.1)
    page.wait_for_selector("#history >> text=stopped early")


def test_a_busy_server_is_retried_in_the_middle_of_a_text(visit: Visit) -> None:
    page = visit()
    asked: list[dict[str, Any]] = []

    def busy_once(route: "Route") -> None:
        asked.append(route.request.post_data_json)
        if len(asked) == 2:
            route.fulfill(status=429, headers={"Retry-After": "1"}, json={"message": "the queue is full"})
        else:
            route.fallback()

    page.route("**/v1/tts", busy_once)
    with page.expect_response(lambda answer: answer.url.endswith("/v1/tts") and len(asked) == 3):
        say(page, " ".join([SHORT] * 25), seed=4)
        page.wait_for_selector("#progress-words >> text=The server is busy; going on in 1 s")
    assert asked[2] == asked[1] != asked[0]
    # No voice is selected: the first line becomes the reference of the following ones.
    assert [reference["text"] for reference in asked[1]["references"]] == [asked[0]["text"]]
    page.keyboard.press("Escape")


def test_audio_generated_before_an_engine_crash_is_kept(visit: Visit, slow_serving: Serving) -> None:
    page = visit(slow_serving.url, limit=False)
    engine = engine_of(slow_serving)
    with slowed(engine):
        say(page, LONG, seed=10)
        wait_until(lambda: playback(page, "samples") > 0, interval=0.1)
        os.kill(engine, signal.SIGKILL)
    page.wait_for_selector("#notice >> text=The audio broke off")
    page.wait_for_selector("#history >> text=broke off")
    slow_serving.wait_until_ready()


def test_every_format_can_be_downloaded(visit: Visit) -> None:
    page = visit()
    say(page)
    wait_until_made(page)
    seconds = playback(page, "samples") / 16_000
    for format in ("mp3", "opus", "flac", "aac", "webm"):
        assert len(samples_of(downloaded(page, format))) / 16_000 == pytest.approx(seconds, abs=0.15)
    assert len(downloaded(page, "pcm")) == 2 * playback(page, "samples")


def test_an_uploaded_voice_speaks_is_renamed_and_deleted(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    add_voice(page, "harbour", recording)
    page.wait_for_selector(".voice[data-name=harbour] input:checked", state="attached")
    say(page, seed=VOICE_SEED)
    wait_until_made(page)
    assert playback(page, "samples") == len(spoken_by_server(serving.url, reference_id="harbour", seed=VOICE_SEED))
    page.click("[aria-label='Edit harbour']")
    page.fill("#new-name", "port")
    page.fill("#voice-title", "Anna of the harbour")
    page.select_option("#voice-gender", "female")
    page.fill("#voice-accent", "Irish")
    page.click("#edit-form >> text=Save")
    page.wait_for_selector(".voice[data-name=port] input:checked", state="attached")
    assert page.inner_text(".voice[data-name=port] .voice-words") == "Anna of the harbour Irish, female"
    page.click("[aria-label='Edit Anna of the harbour']")
    page.click("text=Delete voice")
    page.click("text=Delete for good?")
    page.wait_for_selector(".voice[data-name=port]", state="detached")
    listed = httpx.get(f"{serving.url}/v1/references/list?format=json", trust_env=False, verify=False).json()
    assert "port" not in listed["reference_ids"]


def test_a_taken_voice_name_is_reported_in_the_dialog(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    add_voice(page, "twice", recording)
    page.click("#add-voice")
    page.check("input[value=upload]")
    page.set_input_files("#recording-file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": recording})
    page.fill("#transcript", "Again.")
    page.fill("#voice-name", "twice")
    save_voice(page)
    page.wait_for_selector("#voice-error >> text=The name is taken")


def test_an_invalid_recording_is_reported_in_the_dialog(visit: Visit) -> None:
    page = visit()
    page.click("#add-voice")
    page.check("input[value=upload]")
    page.set_input_files("#recording-file", {"name": "me.wav", "mimeType": "audio/wav", "buffer": b"Only words. " * 99})
    page.fill("#transcript", "What I say in it.")
    page.fill("#voice-name", "written")
    page.click("#save-voice")
    page.wait_for_selector("#voice-error", state="visible")
    expected = "This cannot become a voice as it is. This is a text file, not a recording."
    assert page.inner_text("#voice-error") == expected
    assert page.is_enabled("#save-voice")


def test_a_voice_can_be_recorded(visit: Visit, serving: Serving) -> None:
    page = visit()
    page.click("#add-voice")
    page.click("#record")
    wait_until(lambda: page.inner_text("#record-clock") >= "0:02", interval=0.1)
    page.click("#record")
    page.wait_for_selector("#recording-preview", state="visible")
    page.fill("#voice-name", "by microphone")
    save_voice(page)
    page.wait_for_selector(".voice[data-name='by microphone']")
    assert (serving.voices / "by microphone").is_dir()


def test_a_dialogue_is_spoken_by_its_cast(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    add_voice(page, "first", recording)
    add_voice(page, "second", recording)
    page.check("input[value=dialogue]")
    for speaker, voice in enumerate(("first", "second")):
        page.select_option(f"#cast .speaker-{speaker} select", voice)
    for _ in range(2):
        page.click("[aria-label='Remove line 1']")
    page.fill("[aria-label='Line 1']", "Did you hear that?")
    page.select_option("[aria-label='Speaker of line 1']", "0")
    page.click("#add-turn")
    page.keyboard.type("Hear what?")
    choose_seed(page, VOICE_SEED)
    page.click("#speak")
    page.wait_for_selector("#turns [aria-current]")
    wait_until_made(page)
    lines = (("Did you hear that?", "first"), ("Hear what?", "second"))
    spoken = [len(spoken_by_server(serving.url, text, reference_id=voice, seed=VOICE_SEED)) for text, voice in lines]
    assert playback(page, "samples") == sum(spoken) + 0.2 * 16_000
    page.wait_for_selector("#history >> text=first, second")


def test_history_survives_a_reload(visit: Visit) -> None:
    page = visit()
    say(page, "<img src=x onerror=alert(1)> is only text.", seed=6)
    wait_until_made(page)
    made = playback(page, "samples")
    page.wait_for_selector("#history >> text=<img src=x onerror=alert(1)> is only text.")
    page.reload()
    page.wait_for_selector("#speak:enabled")
    assert playback(page, "samples") == 0
    page.click("[aria-label^='Play: <img']")
    wait_until_heard(page)
    assert (playback(page, "samples"), playback(page, "played")) == (made, made)
    page.fill("#text", "")
    page.click("[aria-label^='Use again']")
    assert page.input_value("#text").startswith("<img")
    assert page.input_value("#seed") == "6"
    page.click("#clear-history")
    page.wait_for_selector("#history-empty", state="visible")


def test_a_speech_deleted_in_another_tab_is_reported_and_removed(visit: Visit) -> None:
    page = visit()
    say(page)
    wait_until_made(page)
    page.wait_for_selector("#history .speech")
    other = page.context.new_page()
    other.goto(page.url)
    other.click("#clear-history")
    other.wait_for_selector("#history-empty", state="visible")
    page.click("[aria-label^='Play: ']")
    page.wait_for_selector("#notice >> text=This speech is no longer kept")
    page.wait_for_selector("#history-empty", state="visible")
    assert page.locator("#history .speech").count() == 0


# Records where pieces are scheduled, with a fake clock that advances only when the player reads it.
RECORD_STARTS = """() => {
  window.laid = [];
  window.now = 1;
  Object.defineProperty(BaseAudioContext.prototype, "currentTime", { get: () => window.now });
  const { setInterval } = window;
  window.setInterval = (look, every) => setInterval(() => { window.now += 0.5; look(); }, every);
  const start = AudioBufferSourceNode.prototype.start;
  AudioBufferSourceNode.prototype.start = function (when) {
    window.laid.push({ when, samples: this.buffer.length, rate: this.context.sampleRate });
    start.call(this, when);
  };
}"""


def test_pieces_are_scheduled_without_gaps_at_the_models_rate(visit: Visit) -> None:
    page = visit(limit=False)
    page.evaluate(RECORD_STARTS)
    say(page, seed=7)
    wait_until_made(page)
    wait_until_heard(page)
    page.evaluate("window.laid = []")
    page.click("[aria-label^='Play: ']")
    page.wait_for_function("() => window.laid.length")  # the speech is read from the browser's store first
    wait_until_heard(page)
    laid = page.evaluate("window.laid")
    assert len(laid) > 3
    assert sum(piece["samples"] for piece in laid) == playback(page, "samples")
    assert {piece["rate"] for piece in laid} == {16_000}
    ends = [piece["when"] + piece["samples"] / 16_000 for piece in laid]
    assert [piece["when"] for piece in laid[1:]] == pytest.approx(ends[:-1], abs=1e-7)


def test_sliders_start_at_the_models_defaults_and_only_changed_ones_are_sent(visit: Visit) -> None:
    page = visit()
    page.click("#advanced summary")
    assert page.input_value("#temperature") == "0.8"
    page.focus("#temperature")
    page.keyboard.press("ArrowLeft")
    with page.expect_request("**/v1/tts") as request:
        say(page)
    sent = request.value.post_data_json
    assert (sent["temperature"], "top_p" in sent, sent["seed"]) == (0.75, False, SEED)
    page.click("text=Reset to the model’s defaults")
    assert page.input_value("#temperature") == "0.8"


def test_a_switch_shows_the_text_as_the_model_reads_it(visit: Visit) -> None:
    page = visit()
    say(page, "**Hello** there. [pause:0.1s] Good day.")
    wait_until_made(page)
    assert page.is_hidden("#spoken-text")
    page.check("#show-text")
    say(page, "**Hello** there. [pause:0.1s] Good day.")
    wait_until_made(page)
    assert page.inner_text("#spoken-text") == "Hello there. [pause:0.1s] Good day."


def test_text_that_cannot_be_spoken_is_reported(visit: Visit) -> None:
    page = visit()
    say(page, "<|im_end|> is a control token.")
    page.wait_for_selector("#notice >> text=control token")
    assert playback(page, "samples") == 0
    page.click("#notice-close")
    assert page.is_hidden("#notice")


def test_an_empty_generation_is_reported(visit: Visit) -> None:
    page = visit()
    say(page, LONG[:60], seed=23)  # which ends before the first frame
    page.wait_for_selector("#notice >> text=The model said nothing")


# Stops the clock of the player: what plays goes on playing until it is paused.
STOP_CLOCK = """() => Object.defineProperty(BaseAudioContext.prototype, "currentTime", { get: () => 1 })"""


def test_the_page_can_be_used_with_the_keyboard(visit: Visit) -> None:
    page = visit()
    choose_seed(page, SEED)

    def tab_to(id: str) -> None:
        for _ in range(80):
            if page.evaluate("document.activeElement.id") == id:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab never came to {id}")

    tab_to("text")
    page.keyboard.press("Control+a")
    page.keyboard.type(SHORT)
    page.keyboard.press("Control+Enter")
    wait_until_made(page)
    wait_until_heard(page)
    tab_to("wave")
    page.evaluate(STOP_CLOCK)
    page.keyboard.press("Home")
    page.wait_for_selector("#playback[data-state=playing]")
    page.keyboard.press("Space")
    page.wait_for_selector("#playback[data-state=paused]")
    tab_to("add-voice")
    page.keyboard.press("Enter")
    page.wait_for_selector("#voice-dialog[open]")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "add-voice"


def test_every_control_has_an_accessible_name(visit: Visit) -> None:
    page = visit()
    page.check("input[value=dialogue]")
    nameless = page.evaluate(NAMELESS)
    assert nameless == []


def test_the_engine_view_shows_running_requests(visit: Visit, slow_serving: Serving) -> None:
    page = visit(slow_serving.url, limit=False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("#engine-card").scroll_into_view_if_needed()
    assert not [url for url in asked if url.endswith("/metrics")], "a closed card asks for nothing"
    page.click("#engine-card summary")
    page.wait_for_selector("#engine >> text=0 of 4")
    say(page, LONG, seed=10)
    page.locator("#engine").scroll_into_view_if_needed()
    page.wait_for_selector("#engine[data-running='1'] >> text=1 of 4")
    assert page.locator(".slot.on").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#engine[data-running='0']")


def test_no_width_needs_sideways_scrolling(visit: Visit) -> None:
    page = visit()
    for mode in ("speech", "dialogue"):
        page.check(f"input[value={mode}]")
        for width in (320, 390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_ends_below_its_footer_however_many_voices_there_are(visit: Visit) -> None:
    page = visit()
    page.evaluate("""() => {
      const list = document.querySelector("#voices"), row = list.querySelector(".voice");
      for (let i = 0; i < 60; i++) list.append(row.cloneNode(true));
    }""")
    footer = page.evaluate("scrollY + document.querySelector('footer').getBoundingClientRect().bottom")
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height <= max(footer + 60, page.evaluate("innerHeight"))


def test_the_theme_follows_the_system_until_one_is_chosen(visit: Visit) -> None:
    def brightness() -> int:
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red)

    page = visit(color_scheme="dark")
    assert brightness() < 30
    page.click("#theme-button")
    assert brightness() > 200
    page.reload()
    assert brightness() > 200
    assert page.get_attribute("#theme-button", "aria-pressed") == "false"


def test_what_is_selected_can_be_seen_in_high_contrast_mode(visit: Visit) -> None:
    page = visit(forced_colors="active")
    background = "(node) => getComputedStyle(node).backgroundColor"
    chosen, other = (
        page.locator(f"#mode input{state} + span").evaluate(background) for state in (":checked", ":not(:checked)")
    )
    assert chosen != other
    assert page.locator(".voice:has(:checked)").evaluate("(node) => getComputedStyle(node).outlineStyle") == "solid"
    assert page.locator("#speed").evaluate("(node) => getComputedStyle(node).forcedColorAdjust") == "none"


COUNT_DRAWINGS = """() => {
  window.drawings = 0;
  const { clearRect } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    window.drawings += 1;
    return clearRect.apply(this, box);
  };
}"""


def test_a_waveform_on_which_nothing_moves_is_drawn_when_it_changes(visit: Visit) -> None:
    page = visit(reduced_motion="reduce")
    page.clock.install()
    page.evaluate(COUNT_DRAWINGS)

    def drawings(milliseconds: int) -> int:
        page.clock.run_for(milliseconds)
        return int(page.evaluate("window.drawings"))

    page.click("#theme-button")
    wait_until(lambda: drawings(100) > 0)
    drawn = drawings(1000)
    assert drawings(20_000) == drawn
    page.set_viewport_size({"width": 500, "height": 800})
    wait_until(lambda: drawings(100) > drawn)


def test_a_server_with_keys_asks_for_the_key_and_reports_retry_after(visit: Visit, tmp_path: Path) -> None:
    key = "a-key-of-our-own-1"
    served = start(tmp_path / "keyed", api_keys=key, requests_per_minute=2, slots=2)
    try:
        page = visit(served.url, ready=False)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "a-key-that-is-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error >> text=Invalid token")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#speak:enabled")
        for _ in range(2):
            say(page)
            wait_until_made(page)
        say(page)
        page.wait_for_selector("#notice >> text=this key may send 2 requests a minute")
        assert page.is_disabled("#notice-action")
        assert page.inner_text("#notice-action").startswith("Try again in")
        page.reload()
        page.wait_for_selector("#speak:enabled")  # the key was stored
    finally:
        served.end()
    say(page)
    page.wait_for_selector("#notice >> text=The server does not answer")


def test_the_api_docs_load_nothing_from_other_origins(visit: Visit, serving: Serving) -> None:
    page = visit(f"{serving.url}/ready", ready=False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{serving.url}/docs")
    page.wait_for_selector('[data-path="/v1/audio/speech"]')
    page.click('[data-path="/v1/tts"]')
    page.wait_for_selector("text=Try it out")
    assert len(asked) > 3
    assert all(url.startswith((serving.url, "data:")) for url in asked), asked


def test_a_broken_speech_continues_from_where_it_stopped(visit: Visit, serving: Serving) -> None:
    page = visit()
    # Speech takes no time by this clock: the page would choose other lines for a machine that has become slower.
    page.evaluate("performance.now = () => 1")
    asked: list[dict[str, Any]] = []

    def break_second(route: "Route") -> None:
        asked.append(route.request.post_data_json)
        if len(asked) == 2:
            route.fulfill(status=503, json={"message": "the engine restarts"})
        else:
            route.fallback()

    page.route("**/v1/tts", break_second)
    text = " ".join([SHORT] * 12)  # two lines
    say(page, text, seed=4)
    page.wait_for_selector("#notice-action >> text=Continue")
    made = playback(page, "samples")
    page.wait_for_selector("#history >> text=broke off")
    page.click("#notice-action")
    page.wait_for_selector("#history >> text=broke off", state="detached")
    wait_until_made(page)
    assert playback(page, "samples") > made > 0
    assert asked[2] == asked[1] != asked[0]
    page.wait_for_selector("#history .speech")  # stored after it was made
    assert page.locator("#history .speech").count() == 1


def test_an_invalid_seed_is_reported_and_not_replaced(visit: Visit) -> None:
    page = visit()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("document.getElementById('advanced').open = true")
    page.fill("#seed", "twelve")
    assert page.get_attribute("#seed", "aria-invalid") == "true"
    page.click("#speak")
    page.wait_for_selector("#notice >> text=The seed is not a number")
    assert page.evaluate("document.activeElement.id") == "seed"
    assert not [url for url in asked if url.endswith("/v1/tts")]
    page.fill("#seed", "12")
    assert page.get_attribute("#seed", "aria-invalid") == "false"


def test_a_long_text_is_made_into_a_file(visit: Visit) -> None:
    page = visit()
    page.fill("#text", "word " * 200_000)
    page.click("#speak")
    page.wait_for_selector("#notice >> text=A page can make about 8 h at a time")
    page.fill("#text", "word " * 4_000)
    page.click("#speak")
    page.wait_for_selector("#notice >> text=This is about 22 min of speech")
    # The server is asked for silence: twenty minutes of speech would take as long as they last.
    silence = {"body": bytes(32_000), "headers": {"X-Sample-Rate": "16000", "Content-Type": "audio/pcm"}}
    page.route("**/v1/tts", lambda route: route.fulfill(status=200, **silence))
    with page.expect_download() as download:
        page.click("text=Make a file")
    audio = Path(download.value.path()).read_bytes()
    lines = (len(audio) - 44) // 32_000
    assert lines > 40
    assert int.from_bytes(audio[40:44], "little") == len(audio) - 44 == 32_000 * lines
    assert playback(page, "samples") == 0
    assert page.locator("#history .speech").count() == 0


def test_the_counter_and_the_notice_name_the_same_duration(visit: Visit) -> None:
    page = visit()
    page.fill("#text", "A wave. " * 12_500)
    assert page.inner_text("#count") == "100,000 characters, about 1.9 h"
    page.click("#speak")
    page.wait_for_selector("#notice >> text=This is about 1.9 h of speech")


def test_a_speech_can_be_copied_as_code_and_downloaded_from_the_history(visit: Visit, serving: Serving) -> None:
    page = visit(limit=False, permissions=["clipboard-read", "clipboard-write"])
    say(page, 'It\'s "quoted".')
    wait_until_made(page)
    page.click("#share")
    code = page.inner_text("#share-code")
    assert code.startswith(f"curl '{serving.url}/v1/tts'")
    command = code.replace("speech.wav", "-").replace("curl ", "curl --noproxy '*' -s ", 1)
    made = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=TIMEOUT_SECONDS)
    assert len(samples_of(made.stdout)) == playback(page, "samples")
    page.check("input[value=python]")
    page.click("#copy-code")
    page.wait_for_selector("#copy-code >> text=Copied")
    compile(page.evaluate("navigator.clipboard.readText()"), "snippet", "exec")
    page.keyboard.press("Escape")
    page.click("[aria-label^='Download or copy as code']")
    with page.expect_download() as download:
        page.click("#share-formats >> text=WAV")
    assert len(Path(download.value.path()).read_bytes()) == 44 + 2 * playback(page, "samples")


def test_a_voice_is_previewed_and_found_by_its_words(visit: Visit, serving: Serving, recording: bytes) -> None:
    page = visit()
    for name in ("anna", "berta", "carl", "dora", "emil", "frida", "gustav"):
        words = {"title": name.title(), "gender": "female" if name.endswith("a") else "male", "preview": "Hello there."}
        form = {"id": f"found {name}", "text": "La la.", **words}
        http_post(serving, "/v1/references/add?format=json", data=form, files={"audio": ("a.wav", recording)})
    page.reload()
    page.fill("#voice-search", "male gus")
    page.wait_for_selector("[data-name='found gustav']", state="visible")
    assert page.locator(".voice:visible").count() == 1
    with page.expect_request("**/v1/tts") as request:
        page.click("[aria-label='Listen to Gustav']")
    assert request.value.post_data_json["reference_id"] == "found gustav"
    assert request.value.post_data_json["text"] == "Hello there."
    page.fill("#voice-search", "nobody")
    page.wait_for_selector("#voices-none", state="visible")
    add_voice(page, "found zoe", recording)
    page.wait_for_selector("[data-name='found zoe'] input:checked", state="attached")
    assert page.input_value("#voice-search") == ""
    listed = page.locator("#voices").bounding_box()
    row = page.locator("[data-name='found zoe']").bounding_box()
    assert listed
    assert row
    assert listed["y"] <= row["y"] <= listed["y"] + listed["height"] - row["height"] + 1
    for voice in page.locator(".voice").all():
        if name := voice.get_attribute("data-name"):
            body = {"reference_id": name}
            http_request(serving, "DELETE", "/v1/references/delete", body)


def assert_the_player_is_in_view(page: "Page") -> None:
    for id in ("play", "speak"):
        shown = page.locator(f"#{id}").bounding_box()
        assert shown
        assert 0 <= shown["y"] <= 720 - shown["height"]


def test_the_player_stays_in_view_below_a_long_text_and_a_long_dialogue(visit: Visit) -> None:
    page = visit(viewport={"width": 1280, "height": 720})
    page.fill("#text", LONG)
    page.locator("#text").scroll_into_view_if_needed()
    assert_the_player_is_in_view(page)
    page.evaluate(
        "localStorage.setItem('shoal.turns', JSON.stringify(Array(40).fill({speaker: 0, text: 'One more line.'})))"
    )
    page.reload()
    page.check("input[value=dialogue]")
    page.locator("#turns li").first.scroll_into_view_if_needed()
    assert_the_player_is_in_view(page)
    # Nothing covers the button: the click arrives.
    page.click("#speak")
    page.click("#speak.busy")


def test_sliders_are_spoken_with_their_units(visit: Visit) -> None:
    page = visit()
    assert page.locator(".actions:has(#speak) #speed").count() == 1, "the speed is beside the button"
    assert page.get_attribute("#speed", "aria-valuetext") == "1 times normal speed (default)"
    page.focus("#speed")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#speed", "aria-valuetext") == "1.05 times normal speed"
    assert page.get_attribute("#volume", "aria-valuetext") == "0 decibels (default)"


def test_the_page_says_if_a_model_does_not_clone(visit: Visit) -> None:
    page = visit()
    assert page.is_hidden("#clone-note")

    def without_cloning(route: "Route") -> None:
        facts = route.fetch().json() | {"clones": False}
        route.fulfill(json=facts)

    page.route("**/v1/about", without_cloning)
    page.reload()
    page.wait_for_selector("#clone-note", state="visible")
    page.click("#add-voice")
    assert page.is_visible("#voice-clone-note")


def test_speech_at_44100_hz_is_played_without_gaps(visit: Visit, tmp_path: Path) -> None:
    """The rate of S1 and S2, which is not a multiple of 8 kHz."""
    made = tmp_path / "model"
    subprocess.run(command("random", "tiny", str(made)), check=True, env=surroundings(tmp_path), cwd=ROOT)
    codec = json.loads((made / "codec.json").read_text())
    (made / "codec.json").write_text(json.dumps(codec | {"sample_rate": 44_100}))
    served = start(tmp_path / "served", model=str(made))
    try:
        page = visit(served.url)
        page.evaluate(RECORD_STARTS)
        say(page, seed=7)
        wait_until_made(page)
        wait_until_heard(page)
        laid = page.evaluate("window.laid")
        assert {piece["rate"] for piece in laid} == {44_100}
        assert sum(piece["samples"] for piece in laid) == playback(page, "samples") == playback(page, "played")
        assert "44.1 kHz" in page.inner_text("#status")
    finally:
        served.end()
