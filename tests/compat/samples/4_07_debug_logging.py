# 4-custom-backend.md, python block 7 (debug logging)
import logging
logging.basicConfig(level=logging.DEBUG)

# 在代碼�添加調試信�
logger = logging.getLogger(__name__)
logger.debug(f"Tensor shape: {tensor.shape}")
