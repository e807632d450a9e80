# 2-yirage.md, python block 11 (调试模�)
import logging
logging.basicConfig(level=logging.DEBUG)

# �用详细日志
import os
os.environ['YIRAGE_LOG_LEVEL'] = 'DEBUG'
