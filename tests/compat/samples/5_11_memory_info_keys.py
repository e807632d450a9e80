# 5-virtual-blackwell.md, python block 11 (`get_memory_info() -> dict`)
{
    'ram': {...},           # CPU内�
    'vram': {...},          # GPU显�
    'npu_memory': {...}     # NPU内�
}
