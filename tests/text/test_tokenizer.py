import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CheckpointError, TextError
from shoal.text.tokenizer import JsonTokenizer, TiktokenTokenizer, Tokenizer, load_tokenizer

FAMILIES = ("s1", "s2")
HOSTILE = ("a", " ", "\n", "<|", "1", ".", "你", "é", "\u200d👍", "<|im_end|>", "'s", " \n")


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_the_stored_ids_of_upstream(family: str, golden: Path) -> None:
    tokenizer = load_tokenizer(golden / family / "checkpoint")
    for case in json.loads((golden / family / "tokenizer_cases.json").read_text()):
        assert tokenizer.encode(case["text"], specials=True) == case["ids"], case["text"]


def test_the_named_ids_of_s1_are_those_of_its_file(s1_tokenizer: TiktokenTokenizer) -> None:
    assert s1_tokenizer.stop_id == s1_tokenizer.token_id("<|im_end|>") == 324
    assert (s1_tokenizer.semantic_begin, s1_tokenizer.semantic_end) == (335, 1366)
    assert s1_tokenizer.vocab_size == 1367


def test_the_named_ids_of_s2_are_those_of_its_file(s2_tokenizer: JsonTokenizer) -> None:
    assert s2_tokenizer.stop_id == s2_tokenizer.token_id("<|im_end|>") == 330
    assert (s2_tokenizer.semantic_begin, s2_tokenizer.semantic_end) == (363, 522)
    assert s2_tokenizer.vocab_size == 523


def test_a_directory_is_loaded_by_the_files_it_holds(golden: Path) -> None:
    assert isinstance(load_tokenizer(golden / "s1" / "checkpoint"), TiktokenTokenizer)
    assert isinstance(load_tokenizer(golden / "s2" / "checkpoint"), JsonTokenizer)


def test_a_control_token_the_vocabulary_lacks_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"<\|nobody\|>"):
        tokenizer.token_id("<|nobody|>")


# Control tokens typed by users


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_encoding_never_gives_a_control_token(
    family: str, data: st.DataObject, s1_tokenizer: Tokenizer, s2_tokenizer: Tokenizer
) -> None:
    tokenizer = s1_tokenizer if family == "s1" else s2_tokenizer
    parts = st.sampled_from(("<|im_end|>", "<|", "|>", "im_end", "<|semantic:5|>", "<think>", " ", "a", "\n"))
    text = data.draw(st.lists(parts | st.text(max_size=3)).map("".join))
    assert max(tokenizer.encode(text), default=0) < (320 if family == "s1" else 328)


def test_a_control_token_in_text_is_refused_by_name(tokenizer: Tokenizer) -> None:
    for text in ("<|im_end|>", "please <|semantic:5|> go", "<|<|im_start|>|>"):
        with pytest.raises(TextError, match=r"control token <\|(im_end|semantic:5|im_start)\|>"):
            tokenizer.check_text(text)


def test_speaker_tags_and_unknown_spellings_are_text(tokenizer: Tokenizer) -> None:
    tokenizer.check_text("<|speaker:0|>Hello<|speaker:12|> a <| b |> <|shrug|> <|semantic:99999|>")


def test_a_speaker_tag_stays_text_in_a_vocabulary_that_registers_it(byte_directory: Path) -> None:
    path = byte_directory / "special_tokens.json"
    specials = json.loads(path.read_text())
    path.write_text(json.dumps({**specials, "<|speaker:0|>": 256 + len(specials)}))
    tokenizer = load_tokenizer(byte_directory)
    tokenizer.check_text("<|speaker:0|>Hello")
    assert max(tokenizer.encode("<|speaker:0|>")) < 256


# Text of every kind


def test_a_vocabulary_of_single_bytes_encodes_text_as_its_bytes(byte_directory: Path) -> None:
    tokenizer = TiktokenTokenizer(byte_directory)
    text = "Héllo, 你好 🙂!\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.encode("a<|im_end|>", specials=True) == [97, 258]
    assert tokenizer.encode("<|im_end|>") == list(b"<|im_end|>")
    assert (tokenizer.stop_id, tokenizer.semantic_begin, tokenizer.semantic_end) == (258, 261, 276)


def test_text_longer_than_a_slice_is_encoded_slice_by_slice(byte_directory: Path) -> None:
    text = "ab " * 150_000
    assert TiktokenTokenizer(byte_directory).encode(text) == list(text.encode())


def test_a_lone_surrogate_is_a_text_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("unit", HOSTILE)
def test_long_runs_of_anything_are_encoded_in_bounded_time(unit: str, tokenizer: Tokenizer) -> None:
    text = unit * (200_000 // len(unit.encode()))
    assert tokenizer.encode(text)
    assert tokenizer.encode(text, specials=True)


# Broken files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.tiktoken", "AA== 0\n!! 1\n", "line 2 is not a base64 token"),
        ("tokenizer.tiktoken", "AA==\n", "line 1 is not a base64 token"),
        ("tokenizer.tiktoken", "AA== 0\n\n= 7\n", "255 of the 256 single bytes have no rank, the first is 1"),
        ("tokenizer.tiktoken", "\udcff", "cannot be read"),
        ("special_tokens.json", "{", "not JSON"),
        ("special_tokens.json", "[1]", "expected a JSON object, found list"),
        ("special_tokens.json", '{"<|im_end|>": 9}', "its position in the file makes it 256"),
        ("special_tokens.json", "{}", r"no token <\|im_end\|>"),
        ("special_tokens.json", '{"<|im_end|>": 256}', r"no token <\|semantic:0\|>"),
        (
            "special_tokens.json",
            '{"<|im_end|>": 256, "<|semantic:0|>": 257, "<|semantic:2|>": 258}',
            r"<\|semantic:1\|> must be token 258",
        ),
    ],
)
def test_a_broken_tiktoken_directory_names_file_and_fault(
    name: str, content: str, message: str, byte_directory: Path
) -> None:
    (byte_directory / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(byte_directory)
    assert name in str(error.value)


def test_ranks_that_leave_a_hole_are_refused(byte_directory: Path) -> None:
    path = byte_directory / "tokenizer.tiktoken"
    path.write_text(path.read_text().replace("/w== 255", "/w== 256"))
    with pytest.raises(CheckpointError, match="are not 0 to 255"):
        load_tokenizer(byte_directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": None}, "added_tokens is not a list"),
        ({"added_tokens": [{"id": 1}]}, "added_tokens is not a list"),
        ({"model": {"type": "nonsense"}}, "not a usable tokenizer"),
        ({"added_tokens": []}, r"no token <\|im_end\|>"),
    ],
)
def test_a_broken_tokenizer_json_names_file_and_fault(
    change: dict[str, object], message: str, golden: Path, tmp_path: Path
) -> None:
    document = json.loads((golden / "s2" / "checkpoint" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(error.value)


def test_a_directory_without_a_tokenizer_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.tiktoken"):
        load_tokenizer(tmp_path)


def test_a_missing_special_tokens_file_is_named(byte_directory: Path) -> None:
    (byte_directory / "special_tokens.json").unlink()
    with pytest.raises(CheckpointError, match=r"special_tokens\.json: no such file"):
        load_tokenizer(byte_directory)
