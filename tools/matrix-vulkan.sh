#!/usr/bin/env bash
# Unpack a lavapipe with cooperative matrices (Mesa 26, from Debian 13's backports) and spirv-val into .cache/matrix-vulkan,
# with the C library they need, without installing anything. Prints the folder. Needs apt; no root.
#
#   tools/matrix-vulkan.sh [FOLDER]
#
# FOLDER/run PROGRAM … runs a program with that C library and that driver; FOLDER/spirv-val checks a module.
set -euo pipefail
folder=${1:-"$(cd "$(dirname "$0")/.." && pwd)/.cache/matrix-vulkan"}
[ -x "$folder/run" ] && { echo "$folder"; exit 0; }
[ "$(dpkg --print-architecture)" = amd64 ] || { echo "matrix-vulkan: only written for x86-64" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/root"
: > "$work/status"
# The system's own mirror and keys, with newer suites.
mirror=$(grep -hE '^(URIs: |deb )' /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | grep -oE 'https?://[^ ]*/debian/?( |$)' | head -1 | tr -d " " || true)
[ -n "$mirror" ] || { echo "matrix-vulkan: no Debian mirror is named in this system's sources" >&2; exit 1; }
cat > "$work/newer.sources" <<S
Types: deb
URIs: $mirror
Suites: trixie trixie-backports forky
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
S
# Debian 13's own spirv-val does not know bfloat16; the next one's runs with the same C library.
pin() { printf 'Package: %s\nPin: release n=%s\nPin-Priority: %s\n\n' "$@" >> "$work/preferences"; }
pin '*' trixie 900
pin '*' forky 100
pin mesa-vulkan-drivers trixie-backports 990
pin spirv-tools forky 990
mkdir "$work/none"
options=(-o "Dir::Etc::SourceList=$work/newer.sources" -o "Dir::Etc::SourceParts=$work/none" -o "Dir::Etc::Preferences=$work/preferences"
  -o "Dir::Etc::PreferencesParts=$work/none" -o "Dir::State=$work" -o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status"
  -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update -qq >/dev/null
apt-get "${options[@]}" install -y -qq --download-only --no-install-recommends mesa-vulkan-drivers spirv-tools libvulkan1 >/dev/null
for package in "$work"/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
rm -rf "$folder"
mkdir -p "$folder/lib"
cp -a "$work"/root/usr/lib/x86_64-linux-gnu/*.so* "$folder/lib/"
cp "$work/root/usr/bin/spirv-val" "$folder/spirv-val.bin"
rm -f "$folder"/lib/libvulkan_{radeon,intel,intel_hasvk,nouveau,virtio,asahi,gfxstream,broadcom,freedreno,panfrost,powervr_mesa}.so
printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.4.0"}}\n' "$folder/lib/libvulkan_lvp.so" > "$folder/lvp.json"
loader='exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib:/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu"'
cat > "$folder/spirv-val" <<S
#!/bin/sh
here=\$(cd "\$(dirname "\$0")" && pwd)
$loader "\$here/spirv-val.bin" "\$@"
S
cat > "$folder/run" <<S
#!/bin/sh
# A virtual environment is found by the name that a program is called by, so that stays as it is.
here=\$(cd "\$(dirname "\$0")" && pwd)
program=\$1
shift
export VK_ICD_FILENAMES="\$here/lvp.json"
unset VK_DRIVER_FILES
$loader --argv0 "\$program" "\$(readlink -f "\$program")" "\$@"
S
chmod +x "$folder/run" "$folder/spirv-val"
echo "$folder"
