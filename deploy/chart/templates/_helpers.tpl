{{/* Refuses values that contradict each other. Every template includes it first, so all refuse the same. */}}
{{- define "nametap.check" -}}
{{- include "nametap.checkNull" . }}
{{- include "nametap.checkVolumes" . }}
{{- with .Values.image }}
{{- if contains "@" .tag }}
{{- fail (printf "image.tag is %q, but each of the three images has a digest of its own: set image.tag to the tag alone, and image.agent.digest, image.init.digest and image.discovery.digest" .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses files in discovery.settings without a volume for them, and mounts without a volume. */}}
{{- define "nametap.checkVolumes" -}}
{{- $names := list }}
{{- range .Values.discovery.extraVolumes }}
{{- if has .name $names }}
{{- fail (printf "discovery.extraVolumes has %q twice: give each volume another name" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- $paths := list }}
{{- range .Values.discovery.extraVolumeMounts }}
{{- if not (has .name $names) }}
{{- fail (printf "discovery.extraVolumeMounts mounts %q, which is not in discovery.extraVolumes: add it there" .name) }}
{{- end }}
{{- if has .mountPath (concat $paths (list "/etc/nametap-inject" "/etc/nametap-tls")) }}
{{- fail (printf "discovery.extraVolumeMounts mounts a second volume at %q: choose another path" .mountPath) }}
{{- end }}
{{- $paths = append $paths .mountPath }}
{{- end }}
{{- range $name := list "config-dir" "kubeconfig" "state-dir" "tls-client-ca" }}
{{- $file := include "nametap.text" (get ($.Values.discovery.settings | default dict) $name) }}
{{- $mounted := not $file }}
{{- range $paths }}
{{- if or (eq $file .) (hasPrefix (printf "%s/" .) $file) }}
{{- $mounted = true }}
{{- end }}
{{- end }}
{{- if not $mounted }}
{{- fail (printf "discovery.settings.%s is %q, which no volume has: add a volume to discovery.extraVolumes, and its directory to discovery.extraVolumeMounts" $name $file) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses null for values that are neither a list nor a map of the user's. Helm removes such a value, so that it is
missing. */}}
{{- define "nametap.checkNull" -}}
{{- $values := .Values }}
{{- range $path := list "image" "image.registry" "image.tag" "image.pullPolicy"
  "image.agent" "image.agent.name" "image.agent.digest" "image.init" "image.init.name" "image.init.digest"
  "image.discovery" "image.discovery.name" "image.discovery.digest"
  "discovery" "discovery.enabled" "discovery.replicas" "discovery.plaintext" "discovery.priorityClassName"
  "discovery.networkPolicy" "discovery.networkPolicy.enabled" "discovery.networkPolicy.apiServerPorts"
  "injection" "injection.webhook" "injection.mode" "injection.controlPlane" "injection.rootCert" "injection.clusterID" "injection.clusterDomain" }}
{{- $value := $values }}
{{- range $key := splitList "." $path }}
{{- $value = index $value $key }}
{{- if kindIs "invalid" $value }}
{{- fail (printf "%s is null: leave it out to have its default" $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* An image: "agent", "init" or "discovery". */}}
{{- define "nametap.image" -}}
{{- $image := get .root.Values.image .image }}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ $image.name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The control plane of injected pods. */}}
{{- define "nametap.controlPlane" -}}
{{- if .Values.injection.controlPlane }}{{ .Values.injection.controlPlane }}
{{- else if .Values.discovery.enabled }}nametap-discovery.{{ .Release.Namespace }}.svc:15012
{{- else }}istiod.istio-system.svc:15012
{{- end }}
{{- end }}

{{/* The ConfigMap with the root certificate of the control plane, which nametap-discovery and istiod write. That
of another control plane is not known. */}}
{{- define "nametap.rootCert" -}}
{{- $controlPlane := include "nametap.controlPlane" . }}
{{- if .Values.injection.rootCert }}{{ .Values.injection.rootCert }}
{{- else if regexMatch "^nametap-discovery\\." $controlPlane }}nametap-ca-root-cert
{{- else if regexMatch "^istiod(-[a-z0-9-]+)?\\." $controlPlane }}istio-ca-root-cert
{{- else }}{{ fail (printf "injection.controlPlane is %q, which is neither a Service nametap-discovery nor istiod: set injection.rootCert to the ConfigMap, in the namespaces of the pods, with its root certificate" $controlPlane) }}
{{- end }}
{{- end }}

{{/* A value as text. A number is a floating-point number here, which toString writes as 1e+06. */}}
{{- define "nametap.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* A map with its values as texts, in JSON. */}}
{{- define "nametap.texts" -}}
{{- $texts := dict }}
{{- range $name, $value := . }}
{{- $_ := set $texts $name (include "nametap.text" $value) }}
{{- end }}
{{- toJson $texts }}
{{- end }}

{{/* The namespaces that are never injected, in JSON. The pods of the release do not wait for themselves. */}}
{{- define "nametap.ignoredNamespaces" -}}
{{- append (.Values.injection.ignoredNamespaces | default list) .Release.Namespace | uniq | toJson }}
{{- end }}
