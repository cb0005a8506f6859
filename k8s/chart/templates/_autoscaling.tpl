{{/*
Autoscaler of a workload: a HorizontalPodAutoscaler, or a ScaledObject of KEDA. Of: root, role, pool, values (minReplicas,
maxReplicas).
*/}}
{{- define "specdec.autoscaler" -}}
{{- $name := include "specdec.name" . -}}
{{- $keda := eq .root.Values.autoscaling.kind "keda" -}}
---
apiVersion: {{ ternary "keda.sh/v1alpha1" "autoscaling/v2" $keda }}
kind: {{ ternary "ScaledObject" "HorizontalPodAutoscaler" $keda }}
metadata: {{- include "specdec.metadata" (dict "root" .root "name" $name) | nindent 2 }}
spec:
{{- if $keda }}
  scaleTargetRef: { name: {{ $name }} }
  minReplicaCount: {{ .values.minReplicas }}
  maxReplicaCount: {{ .values.maxReplicas }}
  cooldownPeriod: {{ ternary 600 300 (eq .role "draft") }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- include "specdec.behavior" . | nindent 8 }}
  triggers:
    {{- range include (printf "specdec.%sTriggers" .role) . | fromYamlArray }}
    - type: prometheus
      name: {{ .name }}
      metadata:
        serverAddress: {{ $.root.Values.autoscaling.prometheus | quote }}
        query: {{ .query | quote }}
        threshold: {{ include "specdec.text" .threshold | quote }}
        {{- with .activationThreshold }}
        activationThreshold: {{ include "specdec.text" . | quote }}
        {{- end }}
    {{- end }}
{{- else }}
  scaleTargetRef: { apiVersion: apps/v1, kind: Deployment, name: {{ $name }} }
  minReplicas: {{ .values.minReplicas }}
  maxReplicas: {{ .values.maxReplicas }}
  metrics:
    {{- range include (printf "specdec.%sMetrics" .role) . | fromYamlArray }}
    - type: {{ .type }}
      {{ lower .type }}:
        metric: { name: {{ .name }} }
        target: { type: AverageValue, averageValue: {{ include "specdec.quantity" .average | quote }} }
    {{- end }}
  behavior: {{- include "specdec.behavior" . | nindent 4 }}
{{- end }}
{{- end }}

{{/* A number as a quantity of Kubernetes: thousandths, if it is not whole. */}}
{{- define "specdec.quantity" -}}
{{- $milli := round (mulf . 1000) 0 | int -}}
{{ if mod $milli 1000 }}{{ $milli }}m{{ else }}{{ div $milli 1000 }}{{ end }}
{{- end }}

{{- define "specdec.behavior" -}}
{{- if eq .role "target" -}}
scaleUp: # a new replica shows in the signals after two minutes: it starts, and the rates are those of a minute
  policies:
    - { type: Pods, value: 2, periodSeconds: 120 }
    - { type: Percent, value: 50, periodSeconds: 120 }
{{ end -}}
scaleDown: # sessions are sticky: moving them costs a replay of their tokens
  stabilizationWindowSeconds: 300
  policies:
    - { type: Pods, value: 1, periodSeconds: 60 }
{{- end }}

{{/*
Targets: root of the number of calls in a replica (by Little's law), which summed over replicas depends on the whole load
alone, so that a decision does not overshoot; requests that wait for a slot; and KV of running sessions.
*/}}
{{- define "specdec.targetMetrics" -}}
{{- with .root.Values.autoscaling.thresholds.target -}}
- { type: Pods, name: specdec_calls_root, average: {{ .callsRoot }} }
- { type: External, name: specdec_requests_queued, average: {{ .queued }} }
- { type: Pods, name: specdec_kv_cache_usage, average: {{ .kvUsage }} }
{{- end }}
{{- end }}

{{- define "specdec.targetTriggers" -}}
{{- $pool := .pool -}}
{{- with .root.Values.autoscaling.thresholds.target -}}
- name: calls
  query: sum(sqrt(rate(specdec:call_latency_seconds_sum{role="target", pool="{{ $pool }}"}[1m])))
  threshold: {{ .callsRoot }}
- name: queued
  query: sum(specdec:num_requests_queued)
  threshold: {{ .queued }}
- name: kv
  query: sum(specdec:kv_cache_usage_perc{role="target", pool="{{ $pool }}"})
  threshold: {{ .kvUsage }}
{{- end }}
{{- end }}

{{/* Drafts: calls in a replica; with KEDA also rounds that found no draft, which start the first, and late drafts. */}}
{{- define "specdec.draftMetrics" -}}
- { type: Pods, name: specdec_calls, average: {{ .root.Values.autoscaling.thresholds.draft.calls }} }
{{- end }}

{{- define "specdec.draftTriggers" -}}
{{- $pool := .pool -}}
{{- with .root.Values.autoscaling.thresholds.draft -}}
- name: none-found
  query: clamp_max(sum(rate(specdec:target_only_steps_total{pool="{{ $pool }}", cause="no_replica"}[1m])), 50)
  threshold: 50
  activationThreshold: 1
- name: calls
  query: sum(rate(specdec:call_latency_seconds_sum{role="draft", pool="{{ $pool }}"}[1m]))
  threshold: {{ .calls }}
  activationThreshold: 0.01
- name: late
  query: sum(rate(specdec:draft_late_total{pool="{{ $pool }}"}[1m]))
  threshold: {{ .late }}
{{- end }}
{{- end }}

{{/* Coordinators: share of a core, because one event loop uses no more; and streams. */}}
{{- define "specdec.coordinatorMetrics" -}}
{{- with .root.Values.autoscaling.thresholds.coordinator -}}
- { type: Pods, name: specdec_processor_share, average: {{ .processorShare }} }
- { type: Pods, name: specdec_num_requests_running, average: {{ .streams }} }
{{- end }}
{{- end }}

{{- define "specdec.coordinatorTriggers" -}}
{{- with .root.Values.autoscaling.thresholds.coordinator -}}
- name: processor
  query: sum(rate(process_cpu_seconds_total{container="coordinator"}[1m]))
  threshold: {{ .processorShare }}
- name: streams
  query: sum(specdec:num_requests_running{role=""})
  threshold: {{ .streams }}
{{- end }}
{{- end }}
