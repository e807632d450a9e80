"""Why this device and not another? In words, and as data."""

import anytorch

print(anytorch.explain())
print()
for device in anytorch.devices(tried="never"):  # "always" also tries each one, in a child process
    print(f"{device.id:10} {device.state.value:16} {device.name}")
    for reason in device.reasons:
        print(f"{'':10} {reason.level.value}: {reason.text}")
