# 2-yirage.md, python block 13 (多�端性能比较)
import yirage as yr
import time
import torch

def benchmark_operation(backend, operation_name, operation_func, *args):
    """基准测试特定�作"""
    yr.set_backend(backend)
    
    # �身
    for _ in range(5):
        result = operation_func(*args)
    
    # 计时
    start_time = time.time()
    for _ in range(100):
        result = operation_func(*args)
    end_time = time.time()
    
    avg_time = (end_time - start_time) / 100 * 1000  # ms
    return avg_time

# 测试�作
def matmul_op(a, b):
    return torch.matmul(a, b)

# 比较所有�端
backends = [b.value for b in yr.get_available_backends()]
a = torch.randn(1024, 1024)
b = torch.randn(1024, 1024)

results = {}
for backend in backends:
    try:
        time_ms = benchmark_operation(backend, 'matmul', matmul_op, a, b)
        results[backend] = time_ms
        print(f"{backend}: {time_ms:.2f} ms")
    except Exception as e:
        print(f"{backend}: Error - {e}")

# 显示最佳�端
if results:
    best_backend = min(results, key=results.get)
    print(f"\nBest backend: {best_backend} ({results[best_backend]:.2f} ms)")
