# 3-kronos.md, python block 0 (使用)
from model import KronosPredictor, Kronos, KronosTokenizer

tokenizer = KronosTokenizer.from_pretrained("NeoQuasar/Kronos-Tokenizer-base")
model = Kronos.from_pretrained("NeoQuasar/Kronos-small")

# 自动检测设备
predictor = KronosPredictor(model, tokenizer, device="auto")
print(f"使用设备: {predictor.device}")

# 强制 CPU
predictor_cpu = KronosPredictor(model, tokenizer, device="cpu")
