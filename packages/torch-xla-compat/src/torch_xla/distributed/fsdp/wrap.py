"""Policies that choose which submodules become units of FSDP."""

from spmd_core.modules.wrap_policies import always_wrap_policy as always_wrap_policy
from spmd_core.modules.wrap_policies import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from spmd_core.modules.wrap_policies import recursive_wrap as recursive_wrap
from spmd_core.modules.wrap_policies import (
    size_based_auto_wrap_policy as size_based_auto_wrap_policy,
)
from spmd_core.modules.wrap_policies import (
    transformer_auto_wrap_policy as transformer_auto_wrap_policy,
)
