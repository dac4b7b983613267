from shoal.metrics import Metrics


def test_what_an_engine_tells_of_its_device_is_shown_and_what_it_does_not_tell_is_not() -> None:
    told: dict[str, object] = {"vram": {"used": 3 << 30, "all": 141 << 30, "allocated": 2 << 30}}
    shown = Metrics(lambda: told).registry.get_sample_value
    assert shown("shoal_vram_bytes") == 3 << 30
    assert shown("shoal_vram_bytes_all") == 141 << 30
    assert shown("shoal_vram_bytes_allocated") == 2 << 30
    assert shown("shoal_engine_resident_bytes") is None
    told.clear()
    assert shown("shoal_vram_bytes") is None
