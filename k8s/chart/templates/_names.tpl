{{/* Metadata of an object. Of: root, name. */}}
{{- define "specdec.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels: { app.kubernetes.io/part-of: specdec }
{{- end }}

{{/* Name of a pool's objects: `draft`, or `draft-code` for the pool `code`. Of: role, pool. */}}
{{- define "specdec.name" -}}
{{ .role }}{{ if and .pool (ne .pool "default") }}-{{ .pool }}{{ end }}
{{- end }}

{{/* Labels by which a workload selects its pods. Of: role, pool (roles without pools have none). */}}
{{- define "specdec.labels" -}}
app.kubernetes.io/name: {{ .role }}
{{- with .pool }}
specdec.dev/pool: {{ . }}
{{- end }}
{{- end }}

{{/* A number or word of the values as text; Helm reads whole numbers as fractions, whose text has an exponent. */}}
{{- define "specdec.text" -}}
{{ if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Image of a role: by digest, or else by tag. Of: root, role. */}}
{{- define "specdec.image" -}}
{{- $images := .root.Values.images -}}
{{ $images.registry }}/{{ index $images.names .role }}
{{- with index $images.digests .role }}@{{ . }}{{ else }}:{{ $images.tag | default .root.Chart.Version }}{{ end }}
{{- end }}

{{/* Secret with the URL of Redis, and its password. */}}
{{- define "specdec.redisSecret" -}}
{{ .Values.redis.secret | default "specdec-redis" }}
{{- end }}

{{/* A pool with the defaults of its role. Of: defaults, values. A field of the pool replaces the default's. */}}
{{- define "specdec.pool" -}}
{{- $pool := deepCopy .defaults -}}
{{- range $key, $value := .values }}{{ $_ := set $pool $key $value }}{{ end -}}
{{ toJson $pool }}
{{- end }}

{{/* MiB as a quantity of Kubernetes, in GiB where it is a whole number of them. */}}
{{- define "specdec.mebibytes" -}}
{{ if mod . 1024 }}{{ int64 . }}Mi{{ else }}{{ div . 1024 }}Gi{{ end }}
{{- end }}
