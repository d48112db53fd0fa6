"""What griffe does not see by itself: `send = awaited(Endpoint.send)` is a method, with the arguments and the text of
that one."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, ExprCall, Extension, Function, Module


class Awaited(Extension):
    """Makes such attributes of anabranch.aio methods that are awaited."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Go through its classes once all is read."""
        for module in pkg["router.aio"].modules.values():
            for cls in module.classes.values():
                for name, member in list(cls.members.items()):
                    if isinstance(member, Attribute) and isinstance(member.value, ExprCall):
                        self._replace(pkg, cls, name, member)

    def _replace(self, pkg: Module, cls: Class, name: str, member: Attribute) -> None:
        call = member.value
        assert isinstance(call, ExprCall)
        if len(call.arguments) != 1:
            return
        owner, _, method = str(call.arguments[0]).rpartition(".")
        found = cls.module.members.get(owner)
        target = found.final_target if found is not None and found.is_alias else found  # type: ignore[union-attr]
        if not isinstance(target, Class) or method not in target.all_members:
            return
        of = target.all_members[method]
        of = of.final_target if of.is_alias else of  # type: ignore[union-attr]
        if isinstance(of, Function):
            made = Function(
                name, parameters=of.parameters, returns=of.returns, docstring=of.docstring, lineno=member.lineno
            )
            made.labels.add("async")
            cls.set_member(name, made)
