from tests import slow


def test_every_listed_file_exists_and_is_listed_once() -> None:
    assert [name for name in slow.FILES if not (slow.ROOT / name).is_file()] == []
    assert len(set(slow.FILES)) == len(slow.FILES)
    assert all((slow.ROOT / folder).is_dir() for folder in slow.FOLDERS)
    assert all((slow.ROOT.parent / folder).is_dir() for folder in slow.SHARED_SERVERS)


def test_the_longest_file_runs_first_and_unlisted_files_last() -> None:
    first, *_, last = slow.FILES
    here = slow.ROOT / "test_slow.py"
    assert slow.order(slow.ROOT / first) < slow.order(slow.ROOT / last) < slow.order(here)
    assert slow.is_slow(slow.ROOT / last)
    assert slow.is_slow(slow.ROOT / "server" / "test_docs.py")
    assert not slow.is_slow(here)


def test_the_files_of_a_folder_with_a_shared_server_stay_on_one_worker() -> None:
    assert slow.scope("tests/clients/test_a.py::test_b[c]") == slow.scope("tests/clients/test_d.py::test_e")
    assert slow.scope("tests/server/test_a.py::test_b") == "tests/server/test_a.py"
