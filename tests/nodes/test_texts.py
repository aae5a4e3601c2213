"""Help and translations cover every node, input and output, and their pictures exist."""

import ast
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
        silent = ("model", "carry_detail")  # the latter is hidden, and has no effect
        missing = [given.id for given in schema.inputs if given.id not in page and not given.id.endswith(silent)]
        assert not missing


def test_every_input_and_output_has_a_tooltip(schemas):
    for schema in schemas.values():
        assert schema.description
        assert all(part.tooltip for part in (*schema.inputs, *schema.outputs))


def reasons() -> set[str]:
    """Why a step was what it was, in all wordings of toma_core; numbers as 2."""
    found = set()
    for path in ("toma_core/plan.py", "toma_core/patcher/run.py"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "why" in node.name]
        for node in (one for function in functions for one in ast.walk(function) if isinstance(one, ast.Return)):
            found |= words(node.value) if node.value else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Decision":
                found |= words(node.args[1])
            if isinstance(node, ast.Assign) and "why" in ast.unparse(node.targets[0]):
                found |= words(node.value)
    return {text for text in found if " " in text}


def words(value: ast.expr) -> set[str]:
    if isinstance(value, ast.IfExp):
        return words(value.body) | words(value.orelse)
    if isinstance(value, ast.Tuple):
        return set().union(*map(words, value.elts))
    if isinstance(value, ast.JoinedStr):
        return {"".join(str(part.value) if isinstance(part, ast.Constant) else "2" for part in value.values)}
    return {str(value.value)} if isinstance(value, ast.Constant) else set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_speaks_all_reasons_in_its_language(language):
    text = (ROOT / "web" / "text.js").read_text(encoding="utf-8")
    table = text.split(f"  {language}: [", 1)[1].split("\n  ],", 1)[0]
    known = [re.compile(pattern) for pattern in re.findall(r"\[/(.+?)/,", table)]
    told = {reason for reason in reasons() if "gradients" not in reason and "schedule" not in reason}  # notes
    assert len(told) > 12
    assert not [reason for reason in told if not any(pattern.match(reason) for pattern in known)]


def test_the_page_has_the_same_texts_in_each_language():
    text = (ROOT / "web" / "text.js").read_text(encoding="utf-8")
    tables = [text.split(f"const {name} = {{", 1)[1].split("\n};", 1)[0] for name in ("EN", "KO", "ZH")]
    rows = [dict(re.findall(r'^  (\w+): "(.*)",$', table, re.MULTILINE)) for table in tables]
    assert len(rows[0]) > 40 and rows[0].keys() == rows[1].keys() == rows[2].keys()
    for key, english in rows[0].items():
        for other in rows[1:]:
            assert set(re.findall(r"\{\w+\}", other[key])) == set(re.findall(r"\{\w+\}", english)), key
