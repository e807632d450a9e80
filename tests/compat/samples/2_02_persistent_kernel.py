# 2-yirage.md, python block 2
mpk = yr.PersistentKernel(
    world_size=1,
    mpi_rank=0,
    num_workers=32,
    num_local_schedulers=16,
    num_remote_schedulers=0,
    max_seq_length=1024,
    eos_token_id=2,
    meta_tensors=[step, tokens],
    profiler_tensor=None,
    spec_decode_config=None,
    backend='mps'  # 指定�端
)
