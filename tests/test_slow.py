from tests import slow


def test_every_listed_file_exists_and_is_listed_once() -> None:
    assert [name for name in slow.FILES if not (slow.ROOT / name).is_file()] == []
    assert len(set(slow.FILES)) == len(slow.FILES)
    assert all((slow.ROOT / folder).is_dir() for folder in slow.FOLDERS)


def test_the_longest_file_runs_first_and_unlisted_files_last() -> None:
    first, *_, last = slow.FILES
    here = slow.ROOT / "test_slow.py"
    assert slow.order(slow.ROOT / first) < slow.order(slow.ROOT / last) < slow.order(here)
    assert slow.is_slow(slow.ROOT / last)
    assert slow.is_slow(slow.ROOT / "server" / "test_docs.py")
    assert not slow.is_slow(here)
