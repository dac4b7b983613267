import httpx
import ormsgpack
import pytest

JSON = {"accept": "application/json"}


def add(http: httpx.Client, name: str, audio: bytes, text: str = "Spoken.") -> httpx.Response:
    return http.post(
        "/v1/references/add", data={"id": name, "text": text}, files={"audio": ("a.wav", audio)}, headers=JSON
    )


def remove(http: httpx.Client, name: str) -> httpx.Response:
    return http.request("DELETE", "/v1/references/delete", json={"reference_id": name}, headers=JSON)


def test_a_voice_can_be_added_listed_used_renamed_and_deleted(http: httpx.Client, recording: bytes) -> None:
    added = add(http, "narrator one", recording)
    assert added.json() == {"success": True, "message": added.json()["message"], "reference_id": "narrator one"}
    assert "narrator one" in http.get("/v1/references/list?format=json").json()["reference_ids"]
    say = {"text": "Hello.", "seed": 1, "max_new_tokens": 6}
    assert (
        http.post("/v1/tts", json={**say, "reference_id": "narrator one"}).content
        != http.post("/v1/tts", json=say).content
    )
    renaming = {"old_reference_id": "narrator one", "new_reference_id": "narrator-2"}
    assert http.post("/v1/references/update", json=renaming, headers=JSON).json()["new_reference_id"] == "narrator-2"
    assert http.post("/v1/tts", json={**say, "reference_id": "narrator one"}).status_code == 404
    assert remove(http, "narrator-2").status_code == 200
    assert not {"narrator one", "narrator-2"} & set(
        http.get("/v1/references/list", headers=JSON).json()["reference_ids"]
    )


def test_responses_are_msgpack_unless_json_is_requested(http: httpx.Client) -> None:
    plain = http.get("/v1/references/list", headers={"accept": "*/*"})
    assert plain.headers["content-type"] == "application/msgpack"
    assert ormsgpack.unpackb(plain.content)["success"] is True
    asked = http.get("/v1/references/list?format=msgpack", headers=JSON)
    assert asked.headers["content-type"] == "application/msgpack"
    assert http.get("/v1/references/list?format=xml").status_code == 422


def test_a_voice_name_can_be_used_only_once(http: httpx.Client, recording: bytes) -> None:
    assert add(http, "twice", recording).status_code == 200
    assert add(http, "twice", recording).status_code == 409
    remove(http, "twice")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "nul\x00", "ａｄｍｉｎ", "x" * 256, "a\u202eb", " a"])
def test_a_voice_name_is_never_a_path(http: httpx.Client, recording: bytes, name: str) -> None:
    assert add(http, name, recording).status_code in (400, 422)
    assert remove(http, name).status_code == 422
    assert http.post("/v1/tts", json={"text": "Hello.", "reference_id": name}).status_code == 422


@pytest.mark.parametrize(("audio", "text"), [(b"", "Spoken."), (b"not audio", "Spoken."), (None, ""), (None, "   ")])
def test_an_invalid_voice_is_rejected(http: httpx.Client, recording: bytes, audio: bytes | None, text: str) -> None:
    assert add(http, "broken", recording if audio is None else audio, text).status_code in (400, 422)
    assert "broken" not in http.get("/v1/references/list?format=json").json()["reference_ids"]


def test_an_unknown_voice_is_a_404(http: httpx.Client) -> None:
    assert remove(http, "nobody").status_code == 404
    renaming = {"old_reference_id": "nobody", "new_reference_id": "somebody"}
    assert http.post("/v1/references/update", json=renaming).status_code == 404


def test_an_unknown_form_part_is_rejected_by_name(http: httpx.Client, recording: bytes) -> None:
    answer = http.post(
        "/v1/references/add", data={"id": "a", "text": "b", "tone": "c"}, files={"audio": ("a", recording)}
    )
    assert (answer.status_code, answer.json()[0]["loc"]) == (422, ["tone"])


def test_a_described_voice_is_listed_by_its_title(http: httpx.Client, recording: bytes) -> None:
    words = {"title": "Anna", "gender": "female", "accent": "Irish", "description": "For stories.", "preview": "Hi."}
    form = {"id": "described", "text": "Spoken.", **words}
    assert http.post("/v1/references/add", data=form, files={"audio": ("a.wav", recording)}).status_code == 200
    (listed,) = [voice for voice in http.get("/v1/about").json()["voices"] if voice["name"] == "described"]
    assert {name: listed[name] for name in words} == words
    shown = http.get("/v1/voices/described").json()
    assert (shown["voice_id"], shown["name"], shown["description"]) == ("described", "Anna", "For stories.")
    assert shown["labels"] == {"gender": "female", "accent": "Irish"}
    assert http.get("/v1/audio/voices/described").json()["name"] == "Anna"
    change = {"reference_id": "described", "title": "Berta"}
    assert http.post("/v1/references/describe", json=change, headers=JSON).json()["success"] is True
    assert http.get("/v1/voices/described").json()["labels"] == {}
    assert remove(http, "described").status_code == 200


def test_invalid_words_about_a_voice_are_refused(http: httpx.Client, recording: bytes) -> None:
    assert add(http, "wordless", recording).status_code == 200
    for words, status in (({"gender": "loud"}, 422), ({"title": "x" * 81}, 422), ({"title": "two\nlines"}, 400)):
        change = {"reference_id": "wordless", **words}
        assert http.post("/v1/references/describe", json=change, headers=JSON).status_code == status
    assert http.post("/v1/references/describe", json={"reference_id": "nobody"}, headers=JSON).status_code == 404
    remove(http, "wordless")


def test_a_recording_is_checked_without_being_stored(http: httpx.Client, recording: bytes) -> None:
    files = {"audio": ("a.wav", recording)}
    report = http.post("/v1/references/check", data={"text": "La."}, files=files, headers=JSON).json()
    assert (report["seconds"], report["sample_rate"], report["channels"]) == (2.0, 16_000, 1)
    assert "short" in {finding["code"] for finding in report["findings"]}
    broken = http.post("/v1/references/check", files={"audio": ("a.wav", b"not audio")}, headers=JSON)
    assert (broken.status_code, broken.json()["message"]) == (400, "this is a text file, not a recording")
