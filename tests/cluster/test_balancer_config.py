"""Flags of `shoal balance` that are refused."""

import pytest

from shoal.cluster.balancer.config import parse_candidate, parse_weights, parse_workers
from shoal.errors import InvalidRequest


@pytest.mark.parametrize(
    ("workers", "weights", "message"),
    [
        ([], [], "no workers"),
        (["ftp://a"], [], "not of the form"),
        (["http://a/path"], [], "not of the form"),
        (["http://a b"], [], "not of the form"),
        (["http://a..b"], [], "not of the form"),
        (["http://a", "http://a/"], [], "twice"),
        (["http://a"], ["http://b=1"], "not one of --workers"),
        (["http://a"], ["http://a=0"], "positive"),
        (["http://a"], ["half"], "URL=NUMBER"),
    ],
)
def test_wrong_workers_and_weights_are_refused(workers: list[str], weights: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_workers(workers, parse_weights(weights))


@pytest.mark.parametrize(
    ("url", "share"), [("ftp://c", 0.1), ("http://a:1", 0.1), ("http://c:1", 0.0), ("http://c:1", 2)]
)
def test_a_wrong_comparison_is_refused(url: str, share: float) -> None:
    with pytest.raises(InvalidRequest):
        parse_candidate(url, share, parse_workers(["http://a:1"], {}))
