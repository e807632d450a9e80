"""The modes: re-exports of anytorch's. With ENABLE_VIRTUAL_BLACKWELL=1, importing this turns the mode of VB_MODE on."""

from anytorch.memory.documented import disable as disable
from anytorch.memory.documented import enable as enable
from anytorch.memory.documented import enable_balanced_mode as enable_balanced_mode
from anytorch.memory.documented import enable_from_environment as _enable_from_environment
from anytorch.memory.documented import enable_full_optimization as enable_full_optimization
from anytorch.memory.documented import enable_memory_mode as enable_memory_mode
from anytorch.memory.documented import enable_speed_mode as enable_speed_mode
from anytorch.memory.documented import get_config as get_config
from anytorch.memory.documented import get_stack as get_stack
from anytorch.memory.documented import get_stats as get_stats
from anytorch.memory.documented import is_enabled as is_enabled
from anytorch.memory.documented import optimize_model as optimize_model
from anytorch.memory.documented import print_stats as print_stats

_enable_from_environment()
