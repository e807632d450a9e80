#!/usr/bin/env bash
# Unpack a newer lavapipe (Mesa's software Vulkan) than the system's into .cache/mesa, without installing it: Debian 12's own
# is 5 to 9 times slower on our kernels. Prints the ICD file to name in VK_ICD_FILENAMES. Needs apt; no root.
#
#   tools/software-vulkan.sh [FOLDER]
set -euo pipefail
folder=${1:-"$(cd "$(dirname "$0")/.." && pwd)/.cache/mesa"}
icd="$folder/lvp.json"
[ -f "$icd" ] && { echo "$icd"; exit 0; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. /etc/os-release
suite="${VERSION_CODENAME:?not a Debian}-backports"
# The same mirror and keys as the system's own sources, with the backports suite.
{ cat /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
  awk -v suite="$suite" -v code="$VERSION_CODENAME" 'BEGIN { RS = ""; ORS = "\n\n" }
    $0 ~ "Suites: " code "( |\n)" { gsub(/Suites: [^\n]*/, "Suites: " suite); print; exit }' > "$work/debian.sources"
if [ ! -s "$work/debian.sources" ]; then
  line=$(grep -hE "^deb .* $VERSION_CODENAME main" /etc/apt/sources.list 2>/dev/null | head -1)
  [ -n "$line" ] || { echo "software-vulkan: no apt source for $VERSION_CODENAME found" >&2; exit 1; }
  echo "${line/ $VERSION_CODENAME / $suite }" > "$work/debian.list"
fi
source=$(ls "$work"/debian.* | head -1)
mkdir -p "$work/lists/partial"
options=(-o "Dir::Etc::SourceList=$source" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/lists" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update -qq >/dev/null
(cd "$work" && apt-get "${options[@]}" download -qq mesa-vulkan-drivers >/dev/null)
dpkg-deb -x "$work"/mesa-vulkan-drivers_*.deb "$work/unpacked"
library=$(find "$work/unpacked" -name libvulkan_lvp.so | head -1)
mkdir -p "$folder"
cp "$library" "$folder/libvulkan_lvp.so"
if ldd "$folder/libvulkan_lvp.so" | grep -q 'not found'; then
  echo "software-vulkan: this lavapipe lacks libraries: $(ldd "$folder/libvulkan_lvp.so" | grep 'not found' | tr -d '\t' | tr '\n' ' ')" >&2
  exit 1
fi
printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' "$folder/libvulkan_lvp.so" > "$icd"
echo "$icd"
