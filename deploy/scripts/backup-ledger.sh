#!/usr/bin/env bash
# At the site: a consistent copy of the ledger while the trainer runs; keep it away from the ledger's secret.
#   deploy/scripts/backup-ledger.sh LEDGER BACKUP_FOLDER
set -euo pipefail
umask 077
ledger=${1:?usage: backup-ledger.sh LEDGER BACKUP_FOLDER}
folder=${2:?usage: backup-ledger.sh LEDGER BACKUP_FOLDER}
mkdir -p "$folder"
${FEDLORA:-fedlora} budget backup "$ledger" "$folder/ledger-$(date -u +%Y%m%dT%H%M%SZ).db"
