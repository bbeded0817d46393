#!/usr/bin/env bash
# Installs the agents of recipes/clients into .clients: Python ones into a virtual environment of their own, so that what
# they depend on meets nothing of ours, and npm ones beside it. What is there already is kept.
#
#   scripts/clients.sh [CLIENT...]      mini-swe-agent openai-agents pydantic-ai codex pi claude-code; default: all
set -euo pipefail
cd "$(dirname "$0")/.."

home=.clients
python=${PYTHON:-python3}
clients=("$@")
[ ${#clients[@]} -gt 0 ] || clients=(mini-swe-agent openai-agents pydantic-ai codex pi claude-code)

packages=() modules=()
for client in "${clients[@]}"; do
    case $client in
        mini-swe-agent) packages+=("mini-swe-agent>=2.4,<3") ;;
        openai-agents) packages+=("openai-agents>=0.5") ;;
        pydantic-ai) packages+=("pydantic-ai-slim[openai,anthropic]>=1") ;;
        codex) modules+=("@openai/codex@>=0.170") ;;
        pi) modules+=("@mariozechner/pi-coding-agent") ;;
        claude-code) modules+=("@anthropic-ai/claude-code@2") ;;
        *) echo "error: no client $client; known: mini-swe-agent openai-agents pydantic-ai codex pi claude-code" >&2
           exit 2 ;;
    esac
done

if [ ${#packages[@]} -gt 0 ]; then
    [ -x "$home/venv/bin/python" ] || "$python" -m venv "$home/venv"
    "$home/venv/bin/python" -m pip --disable-pip-version-check install --quiet "${packages[@]}" </dev/null
fi
if [ ${#modules[@]} -gt 0 ]; then
    if ! command -v npm >/dev/null; then
        echo "error: npm is not installed; it comes with Node.js (Debian: apt-get install npm)" >&2
        exit 1
    fi
    npm install --prefix "$home" --no-audit --no-fund --loglevel error "${modules[@]}" </dev/null
fi
echo "installed: ${clients[*]}"
