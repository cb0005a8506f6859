{{/*
Environment of a service: what all have, what the role has (`env`), and `settings` of the values. Of: root, role, values,
env, table, nvidia, loads, volume. A setting that the chart makes itself is refused.
*/}}
{{- define "specdec.env" -}}
{{- $prefix := printf "SPECDEC_%s__" (upper .role) -}}
{{- $made := include "specdec.madeEnv" (merge (dict "prefix" $prefix) .) -}}
{{ $made }}
{{- $names := list }}{{ range fromYamlArray $made }}{{ $names = append $names .name }}{{ end }}
{{- range $key, $value := .values.settings }}
{{- $name := printf "%s%s" $prefix (upper $key) }}
{{- if has $name $names }}
{{- fail (printf "%s.settings.%s: the chart sets %s itself; remove it" $.field $key $name) }}
{{- end }}
- { name: {{ $name }}, value: {{ include "specdec.text" $value | quote }} }
{{- end }}
{{- end }}

{{- define "specdec.madeEnv" -}}
{{- $prefix := .prefix -}}
{{- $listen := "[::]:" -}}
{{- if .loads -}}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- { name: {{ $prefix }}ADVERTISE, value: "$(POD_IP)" }
- { name: {{ $prefix }}HEALTH, value: "{{ $listen }}{{ add1 .table.port }}" }
- { name: HF_HOME, value: /models }
- { name: XDG_CACHE_HOME, value: /models/.cache } # converted GGUF files; the root is read-only
{{- end }}
- { name: {{ $prefix }}LISTEN, value: "{{ $listen }}{{ .table.port }}" }
- { name: {{ $prefix }}METRICS, value: "{{ $listen }}{{ .table.metrics }}" }
- name: {{ $prefix }}REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ include "specdec.redisSecret" .root }}, key: url } }
- { name: {{ $prefix }}INSECURE, value: "{{ not .root.Values.tls.enabled }}" }
{{- if .root.Values.tls.enabled }}
- { name: {{ $prefix }}TLS_CERT, value: /tls/tls.crt }
- { name: {{ $prefix }}TLS_KEY, value: /tls/tls.key }
- { name: {{ $prefix }}TLS_CA, value: /tls/ca.crt }
{{- if has .role (list "coordinator" "gateway") }}
- { name: {{ $prefix }}TLS_SERVER_NAME, value: {{ .root.Values.tls.serverName }} }
{{- end }}
{{- end }}
{{- if .root.Values.keys.enabled }}
- { name: {{ $prefix }}SERVICE_KEY, value: /keys/service.key }
{{- if has .role (list "coordinator" "gateway") }}
- { name: {{ $prefix }}API_KEYS, value: /keys/keys.txt }
{{- end }}
{{- end }}
{{- if .nvidia }}
- { name: {{ $prefix }}DEVICE, value: cuda }
{{- end }}
{{- if .volume }}
- { name: HF_HUB_OFFLINE, value: "1" } # the init container has fetched the model
{{- end }}
{{ .env }}
{{- end }}

{{/* Container that fetches a model to the shared volume before the service starts. Only it has the hub's token. */}}
{{- define "specdec.modelContainer" -}}
- name: model
  image: {{ include "specdec.image" . }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: # a restart takes the files that are there: a new revision at the hub changes no running model
    - python
    - -c
    - |
      import os, pathlib, huggingface_hub
      model = os.environ["MODEL"]
      complete = pathlib.Path(os.environ["HF_HOME"], "complete", model.replace("/", "--"))
      if not (os.path.exists(model) or complete.exists()):
          huggingface_hub.snapshot_download(model)
          complete.parent.mkdir(exist_ok=True)
          complete.touch()
  env:
    - { name: MODEL, value: {{ .model | quote }} }
    - { name: HF_HOME, value: /models }
    - name: HF_TOKEN
      valueFrom: { secretKeyRef: { name: {{ .root.Values.models.hubTokenSecret }}, key: token } }
  resources:
    requests: { cpu: 500m, memory: 512Mi }
    limits: { memory: 4Gi }
  securityContext: {{- include "specdec.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
    - { name: model-cache, mountPath: /models }
{{- end }}
