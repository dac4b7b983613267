from pathlib import Path

from scripts.configuration_page import SECTIONS, page
from shoal.api.bodies.schemas import SpeechBody
from shoal.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == page()


def test_every_setting_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
    assert set(SECTIONS) < set(Settings.model_fields)


def test_every_field_of_speech_is_documented() -> None:
    content = (DOCS / "http-api.md").read_text()
    assert [name for name in SpeechBody.model_fields if f"`{name}`" not in content] == []
