{{/* The image of a name, such as nametap-discovery. */}}
{{- define "nametap.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
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
{{- append .Values.injection.ignoredNamespaces .Release.Namespace | uniq | toJson }}
{{- end }}
