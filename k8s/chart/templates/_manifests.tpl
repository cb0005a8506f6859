{{/* Paths below `files` of the kustomize manifests that these values install, as JSON. */}}
{{- define "specdec.manifests" -}}
{{- $paths := list -}}
{{- with .Values -}}
{{- if .priorityClasses.create }}{{ $paths = append $paths "k8s/base/priorities.yaml" }}{{ end -}}
{{- if .networkPolicies.enabled }}
{{- $paths = append $paths "k8s/base/network-policies.yaml" }}
{{- if .gateway.enabled }}{{ $paths = append $paths "k8s/components/gateway/workload/network-policies.yaml" }}{{ end }}
{{- if ne .models.source "image" }}{{ $paths = append $paths "k8s/components/model-hub/network-policy.yaml" }}{{ end }}
{{- if ne .platform "generic" }}
{{- $paths = append $paths (printf "k8s/components/platform-%s/network-policies.yaml" .platform) }}
{{- end }}
{{- end }}
{{- if has .platform (list "gke" "eks") }}
{{- $paths = append $paths (printf "k8s/components/platform-%s/load-balancer.yaml" .platform) }}
{{- end }}
{{- if eq .autoscaling.kind "hpa" }}{{ $paths = append $paths "k8s/components/hpa/adapter/rules.yaml" }}{{ end }}
{{- if .monitoring.enabled }}
{{- range $path, $_ := $.Files.Glob "files/k8s/components/monitoring/*.yaml" }}
{{- $paths = append $paths (trimPrefix "files/" $path) }}
{{- end }}
{{- end }}
{{- if .quotas.enabled }}{{ $paths = append $paths "k8s/components/quotas/quotas.yaml" }}{{ end }}
{{- end }}
{{- toJson $paths }}
{{- end }}

{{/*
Objects of a file as JSON, in this release's namespace. Of: root, path. `networkPolicies` replaces the peers of a policy's
first rule, `quotas` the numbers of a quota, and objects of the Prometheus operator get the labels of `monitoring`.
*/}}
{{- define "specdec.objects" -}}
{{- $root := .root -}}
{{- $objects := list -}}
{{- range regexSplit "(?m)^---$" ($root.Files.Get (printf "files/%s" .path)) -1 }}
{{- $object := fromYaml . }}
{{- $name := $object.metadata.name }}
{{- $labels := dict "app.kubernetes.io/part-of" "specdec" }}
{{- if hasPrefix "monitoring.coreos.com/" $object.apiVersion }}
{{- $labels = merge $labels $root.Values.monitoring.labels }}
{{- end }}
{{- $_ := set $object.metadata "labels" $labels }}
{{- if ne $object.kind "PriorityClass" }}{{ $_ := set $object.metadata "namespace" $root.Release.Namespace }}{{ end }}
{{- if eq $object.kind "NetworkPolicy" }}
{{- with index $root.Values.networkPolicies.from $name }}{{ $_ := set (first $object.spec.ingress) "from" . }}{{ end }}
{{- with index $root.Values.networkPolicies.to $name }}{{ $_ := set (first $object.spec.egress) "to" . }}{{ end }}
{{- end }}
{{- if eq $object.kind "ResourceQuota" }}
{{- range $key, $value := $root.Values.quotas.hard }}{{ $_ := set $object.spec.hard $key $value }}{{ end }}
{{- end }}
{{- $objects = append $objects $object }}
{{- end }}
{{- toJson $objects }}
{{- end }}
