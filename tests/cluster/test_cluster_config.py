import pytest

from shoal.cluster.config import Autoscale, ClusterConfig
from shoal.errors import InvalidRequest


def test_bounds_are_read_and_the_upper_one_counts_for_capacity() -> None:
    assert Autoscale.parse("2:8") == Autoscale(2, 8)
    assert ClusterConfig(replicas=3).most == 3
    assert ClusterConfig(replicas=3, autoscale=Autoscale(1, 5)).most == 5


@pytest.mark.parametrize("text", ["", "3", "a:b", "0:2", "3:2", "1:2:3", "-1:2"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--autoscale"):
        Autoscale.parse(text)
