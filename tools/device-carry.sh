#!/bin/sh
# Fill .carry/ with what `make test-device DEVICE_PYTHON=python3` may lack on a machine where nothing can be installed:
# pytest and other pure Python packages, wgpu for that Python (3.12 without an argument), and Debian's Vulkan loader with what
# a headless NVIDIA driver needs; 40 MB. Bring the folder along; what the machine has itself is not taken from it.
#
#     tools/device-carry.sh [3.12 [pandas python-dateutil six]]      # fine-tuning also needs pandas, of 85 MB
set -eu
cd "$(dirname "$0")/.."
python_version=${1:-3.12}
[ $# -eq 0 ] || shift
target=.carry
mkdir -p "$target/python" "$target/vulkan"

package() { # a distribution by its name, as the constraints pin it, in a folder of its own
    [ -d "$target/python/$1" ] || python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "$python_version" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        --constraint constraints.txt --target "$target/python/$1" "$1"
}
for name in pytest pluggy iniconfig packaging pygments rich markdown-it-py mdurl tomli-w \
    safetensors wgpu cffi pycparser rendercanvas "$@"; do
    package "$name"
done

libraries="libvulkan1 libx11-6 libxext6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0 libegl1 libglvnd0"
if command -v apt-get >/dev/null && [ ! -e "$target/vulkan/libvulkan.so.1" ]; then
    scratch=$(mktemp -d)
    (cd "$scratch" && apt-get download -qq $libraries && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
    find "$scratch" -name '*.so.*' -exec cp -L {} "$target/vulkan/" \;
    rm -rf "$scratch"
fi
du -sh "$target"
