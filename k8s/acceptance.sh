#!/usr/bin/env bash
# Accept a deployment on a cluster: deploy it, serve, lose parts of it under load, count the bills; 20 minutes.
#
#     k8s/acceptance.sh [OVERLAY] > acceptance.txt      # OVERLAY defaults to k8s/overlays/production
#
# It prints one page to send back, and ends with status 1 if a step failed. A step that fails does not stop the others.
# It needs kubectl with the rights of a namespace's admin, and a system that nobody else uses meanwhile: it counts all
# bills. It adds the pod `specdec-acceptance` and removes it at the end. The deployment stays, with as many replicas.
#
# Environment:
#     SPECDEC_API_KEY     key of a tenant, if the deployment has keys
#     SPECDEC_TLS_CA      file of the authority, if the deployment has TLS
#     SPECDEC_TLS_SERVER_NAME     name that the coordinator's certificate has; default specdec
#     SPECDEC_ENDPOINT    default coordinator.specdec.svc:50051
#     NAMESPACE           of the deployment; default specdec
#     CLIENT_NAMESPACE    of the client's pod, which network policies must let in; default gateways
#     DRAFT, TARGET       deployments to scale, to roll and to kill; default draft and target
set -uo pipefail

overlay=${1:-k8s/overlays/production}
namespace=${NAMESPACE:-specdec}
client_namespace=${CLIENT_NAMESPACE:-gateways}
endpoint=${SPECDEC_ENDPOINT:-coordinator.$namespace.svc:50051}
server_name=${SPECDEC_TLS_SERVER_NAME:-specdec}
draft=${DRAFT:-draft} target=${TARGET:-target}
readonly NUM_STREAMS=4 TIMEOUT=900s SEED=7 NUM_TOKENS=64
readonly PROMPT="The first thing to know about a cluster is"

work=$(mktemp -d)
page=$work/page
num_failed=0 num_bills_before=0
of() { kubectl --namespace "$namespace" "$@"; }
of_client() { kubectl --namespace "$client_namespace" "$@"; }
say() { echo "$*" >&2; }

# Runs a step and adds its line to the page: the result, the seconds and what the step said last.
step() {
    local title=$1 begun=$SECONDS result=ok
    shift
    say "$title ..."
    "$@" >"$work/step" 2>&1 || { result=FAILED num_failed=$((num_failed + 1)); }
    printf '%-7s %5d s  %-44s %s\n' "$result" $((SECONDS - begun)) "$title" \
        "$(tail -n 1 "$work/step" | cut -c 1-160)" >>"$page"
}

# Runs a command of specdec in the client's pod.
client() {
    local variables=(SPECDEC_ENDPOINT="$endpoint" SPECDEC_API_KEY="${SPECDEC_API_KEY:-}")
    [ -z "${SPECDEC_TLS_CA:-}" ] || variables+=(SPECDEC_TLS_CA=/tmp/ca.pem SPECDEC_TLS_SERVER_NAME="$server_name")
    of_client exec -i specdec-acceptance -- env "${variables[@]}" specdec "$@" </dev/null
}

# Prints the text of a request, which counts among those that are billed if it ends well.
generate() {
    client generate "$PROMPT" --seed "$SEED" --max-new-tokens "$NUM_TOKENS" && echo >>"$work/requests"
}

gives_the_same_text() {
    local text
    text=$(generate) || { echo "the request failed"; return 1; }
    [ "$text" = "$(cat "$work/text")" ] || { echo "seed $SEED gave another text than before"; return 1; }
    echo "seed $SEED gave the same text"
}

deploy() {
    kubectl apply -k "$overlay" && wait_for_rollouts && of get pods --no-headers | wc -l | sed 's/$/ pods/'
}

wait_for_rollouts() {
    local name
    for name in $(of get deployments,statefulsets --output name); do
        of rollout status "$name" --timeout "$TIMEOUT" || return 1
    done
}

start_client() {
    local image
    image=$(of get deployment coordinator --output 'jsonpath={.spec.template.spec.containers[0].image}') || return 1
    of_client run specdec-acceptance --image "$image" --restart Never --command -- sleep 3600 || return 1
    of_client wait --for condition=Ready pod/specdec-acceptance --timeout "$TIMEOUT" || return 1
    [ -z "${SPECDEC_TLS_CA:-}" ] || of_client exec -i specdec-acceptance -- sh -c 'cat > /tmp/ca.pem' <"$SPECDEC_TLS_CA"
}

serve() {
    generate >"$work/text" || { cat "$work/text"; return 1; }
    gives_the_same_text
}

refuse_a_wrong_key() {
    [ -n "${SPECDEC_API_KEY:-}" ] || { echo "left out: no SPECDEC_API_KEY"; return 0; }
    if SPECDEC_API_KEY=wrong generate; then echo "a wrong key was served"; return 1; fi
    echo "a wrong key is refused"
}

scale_drafts_to_zero_and_back() {
    local before result=0
    before=$(of get deployment "$draft" --output 'jsonpath={.spec.replicas}')
    of scale "deployment/$draft" --replicas 0 || return 1
    of wait --for delete pod --selector "app.kubernetes.io/name=$draft" --timeout "$TIMEOUT" || result=1
    gives_the_same_text >"$work/without" || result=1
    of scale "deployment/$draft" --replicas "${before:-1}" || result=1
    of rollout status "deployment/$draft" --timeout "$TIMEOUT" || result=1
    cat "$work/without"
    return "$result"
}

# Sends requests without a pause while a command runs, and fails if one of them fails or gives another text.
under_streams() {
    local result=0 stream num_right num_wrong
    rm -f "$work"/stream-* "$work/end"
    for ((stream = 0; stream < NUM_STREAMS; stream++)); do
        while [ ! -e "$work/end" ]; do gives_the_same_text; done >"$work/stream-$stream" 2>&1 &
    done
    "$@" || result=1
    touch "$work/end"
    wait
    num_right=$(cat "$work"/stream-* | grep -c "gave the same text")
    num_wrong=$(cat "$work"/stream-* | grep -c "failed\|gave another")
    echo "$num_right requests served, $num_wrong not"
    [ "$result" -eq 0 ] && [ "$num_wrong" -eq 0 ] && [ "$num_right" -gt 0 ]
}

roll() { of rollout restart "deployment/$1" && of rollout status "deployment/$1" --timeout "$TIMEOUT"; }

kill_a_pod_of() {
    local pod
    pod=$(of get pods --selector "app.kubernetes.io/name=$1" --output 'jsonpath={.items[0].metadata.name}')
    [ -n "$pod" ] || { echo "there is no pod of $1"; return 1; }
    of delete pod "$pod" --grace-period 0 --force || return 1
    of rollout status "deployment/$1" --timeout "$TIMEOUT"
}

# Prints how many turns have been billed from a minute before this script began.
num_bills() {
    of exec deployment/coordinator -- specdec usage --since "$((SECONDS + 60))s" --format jsonl | grep -c '"outcome"'
}

# Doctor's own turns are billed as well, so the requests of this script are counted from here on.
examine() {
    local result=0
    client doctor --endpoint "$endpoint" || result=1
    num_bills_before=$(num_bills)
    return "$result"
}

# Every request of this run has been billed once.
check_bills() {
    local num_records num_requests
    num_records=$(($(num_bills) - num_bills_before))
    num_requests=$(wc -l <"$work/requests")
    echo "$num_records records of $num_requests requests"
    [ "$num_records" -eq "$num_requests" ]
}

describe() {
    local of=.status.nodeInfo
    local node="{$of.kubeletVersion}, {$of.osImage}, {$of.containerRuntimeVersion}"
    echo "specdec acceptance, $(date -u +%Y-%m-%dT%H:%MZ), overlay $overlay"
    kubectl get nodes --output "jsonpath={range .items[*]}$node{'\n'}{end}" | sort | uniq -c | sed 's/^ */nodes: /'
}

images() {
    of get pods --output "jsonpath={range .items[*]}{range .spec.containers[*]}{.image}{'\n'}{end}{end}" \
        | sort | uniq -c | sed 's/^ */images: /'
}

clean_up() {
    of_client delete pod specdec-acceptance --ignore-not-found --wait=false >&2
    rm -rf "$work"
}
trap clean_up EXIT

describe >"$page"
step "deploy" deploy
step "start a client" start_client
step "doctor finds nothing" examine
step "serve a seed twice" serve
step "refuse a wrong key" refuse_a_wrong_key
step "drafts to zero and back" scale_drafts_to_zero_and_back
step "roll $target under $NUM_STREAMS streams" under_streams roll "$target"
step "roll coordinator under $NUM_STREAMS streams" under_streams roll coordinator
for name in "$draft" "$target" coordinator; do
    step "kill a pod of $name under $NUM_STREAMS streams" under_streams kill_a_pod_of "$name"
done
step "bills" check_bills
images >>"$page"
printf '\n%d steps failed\n' "$num_failed" >>"$page"
cat "$page"
[ "$num_failed" -eq 0 ]
