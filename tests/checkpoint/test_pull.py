import time
from pathlib import Path

import pytest

from shoal.checkpoint.find import BUNDLED_DIRECTORY, find_directory
from shoal.checkpoint.format.directory import find_model_file
from shoal.checkpoint.pull import Hub, pull
from shoal.errors import CheckpointError, InvalidRequest, ModelNotFound, OutputError
from shoal.voices.store import VoiceStore
from tests.checkpoint.fake_hub import COMMIT, REPOSITORY, FakeHub
from tests.nano import DEFAULT_VOICE

SHARD = "model-00001-of-00005.safetensors"


@pytest.fixture
def hub(fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    # A broken line is tried again after a second, two, four: not in a test.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    # What counts as arrived: pieces of 10 MB for models, of 1 kB for a model of 0.5 MB.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    return Hub(endpoint=fake_hub.address, cache=tmp_path / "cache", progress=False)


def test_a_pulled_model_is_found_by_its_name_afterwards(fake_hub: FakeHub, hub: Hub) -> None:
    pulled = pull(REPOSITORY, hub=hub)
    assert pulled.checked
    assert pulled.directory == find_directory(REPOSITORY, cache=hub.cache)
    assert pulled.bytes == sum(len(fake_hub.files[name]) for name in fake_hub.fetched())


def test_only_files_needed_for_inference_are_fetched(fake_hub: FakeHub, hub: Hub) -> None:
    pull(REPOSITORY, hub=hub)
    assert fake_hub.fetched() == set(fake_hub.files) - {"README.md", "model.pth", "samples/one.wav"}


def test_a_dropped_connection_is_resumed_at_the_same_byte(fake_hub: FakeHub, hub: Hub) -> None:
    fake_hub.cut[SHARD], fake_hub.cuts_left = 5000, 1
    directory = pull(REPOSITORY, hub=hub).directory
    assert fake_hub.ranges(SHARD) == ["", "bytes=5000-"]
    assert (directory / SHARD).read_bytes() == fake_hub.files[SHARD]


def test_an_interrupted_download_is_not_a_model_and_resumes_with_the_missing_files(fake_hub: FakeHub, hub: Hub) -> None:
    fake_hub.cut[SHARD] = 5000
    with pytest.raises(ModelNotFound, match=f"was interrupted.*run `shoal pull {REPOSITORY}` again"):
        pull(REPOSITORY, hub=hub)
    with pytest.raises(ModelNotFound, match="shoal pull"):
        find_directory(REPOSITORY, cache=hub.cache)
    arrived = {file.name for file in (hub.cache or Path()).glob("*/snapshots/*/*")}
    assert arrived
    fake_hub.cut.clear()
    fake_hub.requests.clear()
    directory = pull(REPOSITORY, hub=hub).directory
    assert fake_hub.fetched() == {file.name for file in directory.iterdir()} - arrived
    assert (directory / SHARD).read_bytes() == fake_hub.files[SHARD]


def test_a_second_pull_fetches_nothing_again(fake_hub: FakeHub, hub: Hub) -> None:
    pull(REPOSITORY, hub=hub)
    fake_hub.requests.clear()
    pull(REPOSITORY, hub=hub)
    assert fake_hub.fetched() == set()


def test_a_target_directory_appears_atomically(fake_hub: FakeHub, hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    fake_hub.cut["codec.pth"] = 1000
    with pytest.raises(ModelNotFound, match="was interrupted"):
        pull(REPOSITORY, to=to, hub=hub)
    assert not to.exists()
    fake_hub.cut.clear()
    assert pull(REPOSITORY, to=to, hub=hub).directory == to
    assert {file.name for file in to.iterdir()} == fake_hub.fetched()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def one_file_of_weights(hub: FakeHub) -> None:
    """The repository takes S1's layout: what S2 has more of is gone."""
    hub.files = {name: content for name, content in hub.files.items() if not name.startswith("model")}
    hub.files["model.pth"] = b"another form of the same"


def test_a_pull_does_not_resume_from_files_of_another_model(fake_hub: FakeHub, hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    fake_hub.cut["codec.pth"] = 1000
    with pytest.raises(ModelNotFound, match="was interrupted"):
        pull(REPOSITORY, to=to, hub=hub)
    left = {path.name for path in tmp_path.glob(".mine.*")}
    fake_hub.cut.clear()
    fake_hub.requests.clear()
    one_file_of_weights(fake_hub)
    pull(f"{REPOSITORY}@{COMMIT}", to=to, hub=hub)
    assert {file.name for file in to.iterdir()} == fake_hub.fetched()
    assert find_model_file(to).name == "model.pth"
    assert {path.name for path in tmp_path.glob(".mine.*")} == left


def test_files_that_the_repository_no_longer_has_are_removed(fake_hub: FakeHub, hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    fake_hub.cut["codec.pth"] = 1000
    with pytest.raises(ModelNotFound, match="was interrupted"):
        pull(REPOSITORY, to=to, hub=hub)
    assert list(tmp_path.glob(".mine.*/model-*.safetensors"))
    fake_hub.cut.clear()
    one_file_of_weights(fake_hub)
    pull(REPOSITORY, to=to, hub=hub)
    assert find_model_file(to).name == "model.pth"
    assert list(to.glob("model-*.safetensors")) == []


@pytest.mark.parametrize("to", [None, "mine"])
def test_voices_come_with_the_profile_that_names_one(
    to: str | None, fake_hub: FakeHub, hub: Hub, tmp_path: Path
) -> None:
    voice = BUNDLED_DIRECTORY / "voices" / DEFAULT_VOICE
    voices = {f"voices/mine/{file.name}": file.read_bytes() for file in voice.iterdir()}
    fake_hub.files |= {"shoal.json": b'{"voice": "mine"}', **voices}
    for _ in range(2 if to is None else 1):  # what is in the cache is left as it is
        directory = pull(REPOSITORY, to=tmp_path / to if to else None, hub=hub).directory
        store = VoiceStore(tmp_path / "voices", builtin=[directory / "voices"])
        assert store.names() == ["mine"]
        assert store.details("mine") is not None
        assert {file.name for file in (directory / "voices" / "mine").iterdir()} == {
            file.name for file in voice.iterdir()
        }


def test_a_directory_that_exists_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="already exists"):
        pull(REPOSITORY, to=tmp_path, hub=hub)


def test_a_revision_can_be_named(hub: Hub) -> None:
    assert pull(f"{REPOSITORY}@{COMMIT}", hub=hub).directory.name == COMMIT
    with pytest.raises(ModelNotFound, match="no revision v9"):
        pull(f"{REPOSITORY}@v9", hub=hub)


def test_a_gated_repository_says_that_licence_and_token_are_needed(fake_hub: FakeHub, hub: Hub) -> None:
    fake_hub.gated = True
    with pytest.raises(ModelNotFound, match=r"gated.*licence.*HF_TOKEN"):
        pull("s1-mini", hub=hub)


def test_an_unknown_repository_is_said_to_be_unknown(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="has no model reef/other"):
        pull("reef/other", hub=hub)


def test_a_repository_without_a_model_is_refused_before_anything_is_fetched(fake_hub: FakeHub, hub: Hub) -> None:
    fake_hub.files = {"config.json": b"{}", "pytorch_model.bin": b""}
    with pytest.raises(CheckpointError, match="is not a supported model"):
        pull(REPOSITORY, hub=hub)
    assert fake_hub.fetched() == set()


def test_a_repository_that_lacks_a_shard_is_refused(fake_hub: FakeHub, hub: Hub) -> None:
    del fake_hub.files["model-00002-of-00005.safetensors"]
    with pytest.raises(CheckpointError, match=r"incomplete.*model-00002-of-00005"):
        pull(REPOSITORY, hub=hub)


@pytest.mark.parametrize("name", ["", "tiny", "a/b/c", "../etc", "a b/c", "a--b/c", "/root/model", "a/b@", "a/b@../c"])
def test_an_invalid_repository_name_is_refused(name: str, hub: Hub) -> None:
    with pytest.raises(InvalidRequest, match="OWNER/NAME"):
        pull(name, hub=hub)


def test_the_bundled_model_needs_no_download(hub: Hub) -> None:
    with pytest.raises(InvalidRequest, match="nothing to download"):
        pull("nano", hub=hub)


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"cannot be reached.*run `shoal pull s2-pro` again.*--model"):
        pull("s2-pro", hub=Hub(endpoint="http://127.0.0.1:9", cache=tmp_path))
    assert time.monotonic() - before < 240  # not after all the tries that a network would be given


def test_without_a_network_a_cached_model_is_used(fake_hub: FakeHub, hub: Hub) -> None:
    directory = pull(REPOSITORY, hub=hub).directory
    pulled = pull(REPOSITORY, hub=Hub(endpoint="http://127.0.0.1:9", cache=hub.cache))
    assert (pulled.directory, pulled.checked) == (directory, False)


def test_an_unwritable_cache_is_an_output_error(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        pull(REPOSITORY, hub=Hub(endpoint=fake_hub.address, cache=tmp_path / "file" / "cache", progress=False))
