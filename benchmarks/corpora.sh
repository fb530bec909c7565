#!/usr/bin/env bash
# Fetches three real corpora from Debian packages and writes them as JSONL, a document a line.
#
#     bash benchmarks/corpora.sh [--force] [FOLDER]      FOLDER: ~/.cache/andrea_pl/corpora
#
#     novels.jsonl           long prose: Jane Austen's six novels, a document per chapter
#     documentation.jsonl    lists: the sources of Python's documentation, a document per file
#     questions.jsonl        questions and answers: WordNet's glosses and Perl's FAQ
#
# The packages are unpacked in a temporary folder and nothing is installed. The same packages give the same
# bytes. A corpus that is there is kept; --force makes it again. Needs Debian 12's apt-get (any user),
# pod2text (package perl) and python3 with pip.
set -euo pipefail

corpora=(novels documentation questions)
declare -A packages=(
    [novels]="r-cran-janeaustenr"
    [documentation]="python3.11-doc"
    [questions]="wordnet-base perl-doc"
)
declare -A licences=(
    [novels]="novels: public domain; package: MIT"
    [documentation]="PSF License Version 2"
    [questions]="WordNet 3.0 License; Perl FAQ: GPL-1+ or Artistic"
)

die() {
    echo "corpora.sh: $*" >&2
    exit 1
}

force=false
folder="$HOME/.cache/andrea_pl/corpora"
for argument in "$@"; do
    case "$argument" in
        --force) force=true ;;
        -*) die "unknown option $argument; usage: bash benchmarks/corpora.sh [--force] [FOLDER]" ;;
        *) folder="$argument" ;;
    esac
done

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$folder" || die "cannot make the folder $folder: give another one"
work="$(mktemp -d)"
part="$folder/.corpora.$$.part" # in FOLDER, since only a rename within a file system is atomic
trap 'rm -rf "$work" "$part"' EXIT

# fetch PACKAGE: unpacks it into $work/PACKAGE and appends its name and version to $origin.
fetch() {
    echo "fetching $1" >&2
    # root would hand the download to the user _apt, who may not write into the temporary folder
    (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$1" >&2) ||
        die "apt-get cannot download the package $1: run 'apt-get update' as root and try again; if it is" \
            "still not found, run this on Debian 12, which has it"
    local archive=("$work/$1"_*.deb)
    dpkg-deb -x "${archive[0]}" "$work/$1" || die "cannot unpack the package $1 into $work: is there space?"
    origin+="${origin:+, }$1 $(dpkg-deb -f "${archive[0]}" Version)"
}

for corpus in "${corpora[@]}"; do
    target="$folder/$corpus.jsonl"
    # Packages and versions. Written last: where it is, the corpus is complete.
    origin_file="$folder/$corpus.source"
    if [[ $force == false && -s $target && -s $origin_file ]]; then
        echo "kept $target (--force makes it again)" >&2
        continue
    fi
    if [[ $corpus == novels ]]; then # R's data format
        # pip's output is shown only where it fails: it complains about packages outside the target, too
        python3 -m pip install --no-compile --target "$work/python" rdata==1.1.0 >"$work/pip.log" 2>&1 || {
            cat "$work/pip.log" >&2
            die "pip cannot install rdata 1.1.0 into $work: see its message above"
        }
    elif [[ $corpus == questions ]]; then
        command -v pod2text >/dev/null || die "pod2text is missing: install the package perl"
    fi
    origin=""
    for package in ${packages[$corpus]}; do
        fetch "$package"
    done
    PYTHONPATH="$work/python" python3 "$here/corpora.py" "$corpus" "$work" >"$part" ||
        die "cannot make $target from $origin: see the message above"
    rm -f "$origin_file"
    mv "$part" "$target"
    echo "$origin" >"$origin_file"
done

row="%-14s %9s %10s  %-50s %s\n"
# shellcheck disable=SC2059  # the format is the constant above
printf "$row" corpus documents bytes "packages and versions" licence
for corpus in "${corpora[@]}"; do
    target="$folder/$corpus.jsonl"
    # shellcheck disable=SC2059
    printf "$row" "$corpus" "$(wc -l <"$target")" "$(wc -c <"$target")" "$(<"$folder/$corpus.source")" \
        "${licences[$corpus]}"
done
