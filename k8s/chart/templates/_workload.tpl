{{/*
Deployment and disruption budget of a service. Of: root, role, pool (empty for roles without pools), values (those of the
service or pool), field (their path, for errors), model (that it loads), scaled (an autoscaler has the number of replicas),
env (YAML, settings that only this role has).
*/}}
{{- define "specdec.workload" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $table := index (include "specdec.roles" . | fromYaml) .role -}}
{{- $labels := include "specdec.labels" . -}}
{{- $nvidia := eq ($values.accelerator | default "none") "nvidia" -}}
{{- $loads := ne .role "gateway" -}}
{{- $volume := and $loads (eq $root.Values.models.source "volume") -}}
{{- $context := merge (dict "table" $table "nvidia" $nvidia "loads" $loads "volume" $volume) . -}}
apiVersion: apps/v1
kind: Deployment
metadata: {{- include "specdec.metadata" (dict "root" $root "name" (include "specdec.name" .)) | nindent 2 }}
spec:
  {{- if not .scaled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- $labels | nindent 6 }}
  strategy: # with GPUs the old pod ends first, so that a rollout needs no spare one
    rollingUpdate: { maxUnavailable: {{ ternary 1 0 $nvidia }}, maxSurge: {{ ternary 0 1 $nvidia }} }
  progressDeadlineSeconds: 3600 # a pod may fetch and load 140 GB of weights first
  template:
    metadata:
      labels: {{- $labels | nindent 8 }}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: {{ $table.metrics | quote }}
        {{- with include "specdec.platformAnnotations" $root }}{{ . | nindent 8 }}{{ end }}
    spec:
      automountServiceAccountToken: false
      priorityClassName: {{ ternary "specdec-draft" "specdec" (eq .role "draft") }}
      terminationGracePeriodSeconds: {{ $table.graceS }}
      {{- with include "specdec.pullSecrets" $root }}{{ . | nindent 6 }}{{ end }}
      securityContext: {{- include "specdec.podSecurity" (dict "root" $root "user" 10001) | nindent 8 }}
        {{- if $volume }}
        fsGroupChangePolicy: OnRootMismatch # or each start would change the owner of every file
        {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- $labels | nindent 14 }}
      {{- if or $nvidia $values.nodeSelector }}
      nodeSelector:
        {{- if $nvidia }}
        nvidia.com/gpu.present: "true"
        {{- end }}
        {{- with $values.nodeSelector }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
      {{- if or $nvidia $values.tolerations }}
      tolerations:
        {{- if $nvidia }}
        - { key: nvidia.com/gpu, operator: Exists, effect: NoSchedule }
        {{- end }}
        {{- with $values.tolerations }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
      {{- if $volume }}
      initContainers: {{- include "specdec.modelContainer" $context | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "specdec.image" . }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          env: {{- include "specdec.env" $context | nindent 12 }}
          {{- include (ternary "specdec.grpcEndpoints" "specdec.httpEndpoints" $loads) $context | nindent 10 }}
          {{- with $table.preStopS }}
          lifecycle: # clients and load balancers see the end before the process refuses them
            preStop: { sleep: { seconds: {{ . }} } }
          {{- end }}
          resources: {{- $values.resources | default (ternary $table.nvidiaResources $table.resources $nvidia) | toYaml | nindent 12 }}
          securityContext: {{- include "specdec.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            {{- if $loads }}
            - { name: model-cache, mountPath: /models }
            {{- end }}
            {{- if $nvidia }}
            - { name: shm, mountPath: /dev/shm }
            {{- end }}
            {{- if $root.Values.tls.enabled }}
            - { name: tls, mountPath: /tls, readOnly: true }
            {{- end }}
            {{- if $root.Values.keys.enabled }}
            - { name: keys, mountPath: /keys, readOnly: true }
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {}
        {{- if $loads }}
        - name: model-cache
          {{- if $volume }}
          persistentVolumeClaim: { claimName: {{ $root.Values.models.volume.existingClaim | default "models" }} }
          {{- else }}
          emptyDir: {}
          {{- end }}
        {{- end }}
        {{- if $nvidia }}
        - name: shm
          emptyDir: { medium: Memory, sizeLimit: 1Gi }
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - name: tls
          secret: { secretName: {{ $root.Values.tls.secret }}, defaultMode: 0440 } # the group of the pod reads the key
        {{- end }}
        {{- if $root.Values.keys.enabled }}
        - name: keys
          secret:
            secretName: {{ $root.Values.keys.secret }}
            defaultMode: 0440 # the group of the pod reads the keys
            {{- if has .role (list "draft" "target") }}
            items: [{ key: service.key, path: service.key }] # replicas need no key of a tenant
            {{- end }}
        {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "specdec.metadata" (dict "root" $root "name" (include "specdec.name" .)) | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- $labels | nindent 6 }}
{{- end }}

{{/* Ports, times and sizes of each role. graceS is longer than a drain and preStop. */}}
{{- define "specdec.roles" -}}
coordinator:
  port: 50051
  metrics: 9051
  graceS: 330
  preStopS: 5
  resources:
    requests: { cpu: 500m, memory: 512Mi }
    limits: { memory: 1Gi }
draft:
  port: 50061
  metrics: 9061
  graceS: 45
  resources:
    requests: { cpu: "1", memory: 1Gi }
    limits: { memory: 4Gi }
  nvidiaResources:
    requests: { cpu: "2", memory: 8Gi }
    limits: { memory: 32Gi, nvidia.com/gpu: 1 }
target:
  port: 50071
  metrics: 9071
  graceS: 345
  resources:
    requests: { cpu: "2", memory: 2Gi }
    limits: { memory: 8Gi }
  nvidiaResources:
    requests: { cpu: "4", memory: 16Gi }
    limits: { memory: 64Gi, nvidia.com/gpu: 1 }
gateway:
  port: 8000
  metrics: 9081
  graceS: 330
  preStopS: 5
  resources:
    requests: { cpu: 500m, memory: 256Mi }
    limits: { memory: 512Mi }
{{- end }}

{{/* Ports and probes of a service whose health port speaks gRPC; it opens before anything is loaded. */}}
{{- define "specdec.grpcEndpoints" -}}
{{- $health := add1 .table.port -}}
ports:
  - { name: grpc, containerPort: {{ .table.port }} }
  - { name: health, containerPort: {{ $health }} }
  - { name: metrics, containerPort: {{ .table.metrics }} }
startupProbe:
  grpc: { port: {{ $health }}, service: liveness }
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  grpc: { port: {{ $health }} }
  periodSeconds: 5
livenessProbe: # alive, not ready: a loading, draining or waiting process must not be restarted
  grpc: { port: {{ $health }}, service: liveness }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 4
  terminationGracePeriodSeconds: 30 # a hung process ends no turn, so it is not waited for
{{- end }}

{{/* Ports and probes of the HTTP gateway. */}}
{{- define "specdec.httpEndpoints" -}}
{{- $scheme := ternary ", scheme: HTTPS" "" .root.Values.tls.enabled -}}
ports:
  - { name: http, containerPort: {{ .table.port }} }
  - { name: metrics, containerPort: {{ .table.metrics }} }
startupProbe:
  httpGet: { path: /health, port: http{{ $scheme }} }
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: { path: /ready, port: http{{ $scheme }} }
  periodSeconds: 5
livenessProbe: # alive, not ready: a draining or waiting process must not be restarted
  httpGet: { path: /health, port: http{{ $scheme }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 4
  terminationGracePeriodSeconds: 30 # a hung process ends no turn, so it is not waited for
{{- end }}

{{/* Users of a pod. Of: root, user. OpenShift gives each namespace a range of ids and refuses others. */}}
{{- define "specdec.podSecurity" -}}
runAsNonRoot: true
seccompProfile: { type: RuntimeDefault }
{{- if ne .root.Values.platform "openshift" }}
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
{{- end }}
{{- end }}

{{- define "specdec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: ["ALL"] }
{{- end }}

{{- define "specdec.platformAnnotations" -}}
{{- if eq .Values.platform "openshift" -}}
openshift.io/required-scc: restricted-v2
{{- end }}
{{- end }}

{{- define "specdec.pullSecrets" -}}
{{- with .Values.images.pullSecret -}}
imagePullSecrets: [{ name: {{ . }} }]
{{- end }}
{{- end }}
