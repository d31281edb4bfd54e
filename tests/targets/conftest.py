"""Tests marked `targets` compile for accelerators; they run with -m targets only."""


def pytest_collection_modifyitems(config, items):
    if "targets" in config.option.markexpr:
        return
    marked = [item for item in items if item.get_closest_marker("targets")]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if not item.get_closest_marker("targets")]
