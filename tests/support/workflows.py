"""Workflow files as the front end saves them, turned into prompts for the server's API."""

CANVAS_ONLY = {"Note", "MarkdownNote"}
MUTED, BYPASSED = 2, 4


def inputs_of(info: dict) -> dict[str, list]:
    """All inputs of a node class in the order of its widgets, from /object_info."""
    return {**info["input"].get("required", {}), **info["input"].get("optional", {})}


def is_widget(kind, options: dict) -> bool:
    return (isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")) and not options.get(
        "forceInput"
    )


def widget_values(saved: dict, info: dict) -> dict:
    values = saved.get("widgets_values") or []
    if isinstance(values, dict):
        return dict(values)
    values, named = list(values), {}
    for name, (kind, *rest) in inputs_of(info).items():
        options = rest[0] if rest else {}
        if not is_widget(kind, options) or not values:
            continue
        named[name] = values.pop(0)
        # The front end adds a widget of its own behind seeds.
        if (
            options.get("control_after_generate")
            and values
            and values[0]
            in (
                "fixed",
                "increment",
                "decrement",
                "randomize",
            )
        ):
            values.pop(0)
    return named


def to_prompt(workflow: dict, object_info: dict) -> dict:
    """UI format to API format. Knows no subgraphs: the shipped workflows have none."""
    nodes = {saved["id"]: saved for saved in workflow["nodes"]}
    sources = {link[0]: (link[1], link[2]) for link in workflow["links"]}

    def resolve(link: int | None) -> list | None:
        if link is None:
            return None
        origin, slot = sources[link]
        saved = nodes[origin]
        if saved.get("mode", 0) == MUTED:
            return None
        if saved["type"] == "Reroute" or saved.get("mode", 0) == BYPASSED:
            kind = saved["outputs"][slot]["type"]
            passed = [entry for entry in saved["inputs"] if entry["type"] in (kind, "*") and "widget" not in entry]
            return resolve(passed[0]["link"]) if passed else None
        return [str(origin), slot]

    prompt = {}
    for number, saved in nodes.items():
        if saved["type"] in CANVAS_ONLY | {"Reroute"} or saved.get("mode", 0) in (MUTED, BYPASSED):
            continue
        inputs = widget_values(saved, object_info[saved["type"]])
        for entry in saved.get("inputs", []):
            source = resolve(entry.get("link"))
            if source:
                inputs[entry["name"]] = source
        prompt[str(number)] = {"class_type": saved["type"], "inputs": inputs}
    return prompt
