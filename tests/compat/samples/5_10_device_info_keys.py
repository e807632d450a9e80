# 5-virtual-blackwell.md, python block 10 (`get_device_info() -> dict`)
{
    'cuda_available': bool,
    'npu_available': bool,
    'device_count': int,
    'device_name': str,
    'device_type': str,  # 'cuda' / 'npu' / 'cpu'
    'cuda_version': str or None,
    'npu_version': str or None
}
