"""Help and translations cover every node, input and output, and their pictures exist."""

import json
import re
from pathlib import Path

import pytest
from comfy_here import finish

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("ko", "zh")


@pytest.fixture(scope="module")
def schemas(comfy):
    from comfyui_toma.nodes import ToMAExtension

    nodes = finish(ToMAExtension().get_node_list())
    return {schema.node_id: schema for schema in (node.GET_SCHEMA() for node in nodes)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_cover_the_nodes(schemas, language):
    translated = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(translated) == set(schemas)
    for name, schema in schemas.items():
        ours = translated[name]
        assert ours["display_name"] and ours["description"]
        assert list(ours["inputs"]) == [given.id for given in schema.inputs]
        assert list(ours["outputs"]) == [str(i) for i in range(len(schema.outputs))]
        for text in (*ours["inputs"].values(), *ours["outputs"].values()):
            assert text["name"] and text["tooltip"]
            assert not re.search(r"[{}@|]", text["tooltip"]), "these have a meaning to the page's translator"


@pytest.mark.parametrize("language", ("en", *LANGUAGES))
def test_every_node_has_help_with_a_picture(schemas, language):
    docs = ROOT / "web" / "docs"
    for name, schema in schemas.items():
        page = (docs / name / f"{language}.md").read_text(encoding="utf-8")
        pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
        assert pictures and all((docs / picture).is_file() for picture in pictures)
        if name != "ToMA":
            missing = [given.id for given in schema.inputs if given.id not in page and "model" not in given.id]
            assert not missing


def test_every_input_and_output_has_a_tooltip(schemas):
    for schema in schemas.values():
        assert schema.description
        assert all(part.tooltip for part in (*schema.inputs, *schema.outputs))
