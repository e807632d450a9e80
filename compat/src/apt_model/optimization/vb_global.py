"""The modes. With ENABLE_VIRTUAL_BLACKWELL=1, importing this turns the mode of VB_MODE on."""

from anytorch_compat.modes import disable as disable
from anytorch_compat.modes import enable as enable
from anytorch_compat.modes import enable_balanced_mode as enable_balanced_mode
from anytorch_compat.modes import enable_from_environment as _enable_from_environment
from anytorch_compat.modes import enable_full_optimization as enable_full_optimization
from anytorch_compat.modes import enable_memory_mode as enable_memory_mode
from anytorch_compat.modes import enable_speed_mode as enable_speed_mode
from anytorch_compat.modes import explain as explain
from anytorch_compat.modes import get_config as get_config
from anytorch_compat.modes import get_stack as get_stack
from anytorch_compat.modes import get_stats as get_stats
from anytorch_compat.modes import is_enabled as is_enabled
from anytorch_compat.modes import optimize_model as optimize_model
from anytorch_compat.modes import print_stats as print_stats

_enable_from_environment()
