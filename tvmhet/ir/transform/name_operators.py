"""Give every call of `main` a unique name that a person can find in the model.

Before:  lv  = R.nn.conv2d(x, conv1_weight)      After:  conv1      = R.nn.conv2d(x, conv1_weight)
         lv1 = R.add(lv, conv1_bias)                     conv1_add  = R.add(conv1, conv1_bias)
         gv  = R.nn.relu(lv1)                            relu       = R.nn.relu(conv1_add)

A call that reads a parameter is named after the parameter's module, any other after its operator; `_1`, `_2`, ...
keep names apart. Runs last of the normalisation passes. Idempotent. Order, operators and parameters are untouched;
aliases and tuples that compute nothing disappear.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvmhet.ir.bindings import Bindings, Emitter, rebuild_main
from tvmhet.ir.naming import operator_names


@tvm.transform.module_pass(opt_level=0, name="tvmhet.NameOperators")
class NameOperators:
    """Rename the variables of `main`'s calls by `operator_names`."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        names = operator_names(bindings)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for old in bindings.calls:
                env |= emitter.emit(bindings.rebuild(old, env), bindings.results[old], names[old])

        return rebuild_main(mod, bindings, emit)
