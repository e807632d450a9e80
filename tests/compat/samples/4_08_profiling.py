# 4-custom-backend.md, python block 8 (profiling)
import time
import cProfile

def profile_function(func):
    def wrapper(*args, **kwargs):
        start_time = time.time()
        result = func(*args, **kwargs)
        end_time = time.time()
        print(f"{func.__name__} took {end_time - start_time:.4f} seconds")
        return result
    return wrapper

@profile_function
def my_computation():
    # 您的計算代碼
    pass
