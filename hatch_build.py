"""Build hook: compiles the native library into the package.

A wheel with the library is for one platform; without a C++ compiler the wheel is pure Python and says so.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = load_build_module(Path(self.root) / "shoal" / "native" / "build.py")
        target = build.BUNDLED / build.library_name()
        try:
            if not target.exists():
                build.compile_library(target)
        except build.BuildFailed as error:
            self.app.display_warning(f"without the native CPU backend: {error}")
            return
        for old in build.BUNDLED.glob("*.so"):
            if old != target:
                old.unlink()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append("shoal/native/lib/*.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def load_build_module(path: Path) -> ModuleType:
    """Import the module by its path: importing the package would need its dependencies."""
    spec = importlib.util.spec_from_file_location("shoal_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
