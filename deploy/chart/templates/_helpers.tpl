{{/* Refuses values that contradict each other. Every template includes it first, so all refuse the same. */}}
{{- define "nametap.check" -}}
{{- include "nametap.checkNull" . }}
{{- include "nametap.checkVolumes" . }}
{{- include "nametap.checkSettings" . }}
{{- include "nametap.checkResources" (dict "path" "discovery.resources" "resources" (.Values.discovery.resources | default dict)) }}
{{- include "nametap.checkResources" (dict "path" "injection.resources" "resources" (.Values.injection.resources | default dict)) }}
{{- with index (index (.Values.injection.resources | default dict) "limits" | default dict) "memory" }}
{{- if lt (include "nametap.quantity" . | float64) 33554432.0 }}
{{- fail (printf "injection.resources.limits.memory is %s, and the agent needs 32Mi: raise it" (include "nametap.text" .)) }}
{{- end }}
{{- end }}
{{- with .Values.image }}
{{- if contains "@" .tag }}
{{- fail (printf "image.tag is %q, but each of the three images has a digest of its own: set image.tag to the tag alone, and image.agent.digest, image.init.digest and image.discovery.digest" .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses settings of nametap-discovery that contradict other values. */}}
{{- define "nametap.checkSettings" -}}
{{- $settings := .Values.discovery.settings | default dict }}
{{- if not (or .Values.discovery.serviceAccount.create .Values.discovery.serviceAccount.name) }}
{{- fail "discovery.serviceAccount.create is false: set discovery.serviceAccount.name to a service account in the namespace of the release" }}
{{- end }}
{{- range $name := list "tls-cert" "tls-key" }}
{{- if hasKey $settings $name }}
{{- fail (printf "discovery.settings.%s stands beside the Secret that the chart makes: set discovery.tls.secret to a Secret with tls.crt and tls.key instead" $name) }}
{{- end }}
{{- end }}
{{- with .Values.discovery.tls.secret }}
{{- if $.Values.discovery.tls.certManager }}
{{- fail "discovery.tls.certManager makes a Secret, and discovery.tls.secret names another one: leave one of them out" }}
{{- end }}
{{- if has . (list "nametap-discovery-cert" "nametap-discovery-ca") }}
{{- fail (printf "discovery.tls.secret is %q, a Secret that the chart makes without this value: leave it out, or give your Secret another name" .) }}
{{- end }}
{{- end }}
{{- range $name, $value := dict "cluster-domain" .Values.injection.clusterDomain "cluster-id" .Values.injection.clusterID }}
{{- $own := include "nametap.text" (index $settings $name) }}
{{- $key := eq $name "cluster-id" | ternary "clusterID" "clusterDomain" }}
{{- if and (hasKey $settings $name) $value (ne (trimSuffix "." $own) (trimSuffix "." $value)) }}
{{- fail (printf "discovery.settings.%s is %q and injection.%s is %q: set injection.%s alone, which both use" $name $own $key $value $key) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether pods use nametap-discovery of this release; empty if not. */}}
{{- define "nametap.ownControlPlane" -}}
{{- if and .Values.discovery.enabled (hasPrefix (printf "nametap-discovery.%s." .Release.Namespace) (include "nametap.controlPlane" .)) }}true{{ end }}
{{- end }}

{{/* The DNS names of nametap-discovery, in JSON. */}}
{{- define "nametap.dnsNames" -}}
{{- $name := printf "nametap-discovery.%s" .Release.Namespace }}
{{- $domain := index (.Values.discovery.settings | default dict) "cluster-domain" | default .Values.injection.clusterDomain }}
{{- list $name (printf "%s.svc" $name) (printf "%s.svc.%s" $name (trimSuffix "." (include "nametap.text" $domain))) | toJson }}
{{- end }}

{{/* The certificates that Helm makes, in JSON; {} if it makes none: without a cluster, as in `helm template`, it cannot
see whether there is an authority that pods trust. All templates get the same. */}}
{{- define "nametap.certificates" -}}
{{- if not (hasKey .Values "certificates") }}
{{- $made := dict }}
{{- $tls := .Values.discovery.tls }}
{{- if and .Values.discovery.enabled (not $tls.secret) (not $tls.certManager) (lookup "v1" "Namespace" "" "kube-system") }}
{{- $authority := genCAWithKey "nametap-discovery" 36500 (genPrivateKey "ecdsa") }}
{{- with lookup "v1" "Secret" .Release.Namespace "nametap-discovery-ca" }}
{{- $authority = buildCustomCert (index .data "tls.crt") (index .data "tls.key") }}
{{- else }}
{{- /* The Secret in which replicas kept it before Helm made it. */}}
{{- $before := lookup "v1" "Secret" .Release.Namespace "nametap-discovery-tls" | default dict }}
{{- if dig "data" "ca.key" "" $before }}
{{- $authority = buildCustomCert (index $before.data "ca.crt") (index $before.data "ca.key") }}
{{- end }}
{{- end }}
{{- $server := genSignedCertWithKey "nametap-discovery" nil (include "nametap.dnsNames" . | fromJsonArray) 3650 $authority (genPrivateKey "ecdsa") }}
{{- $made = dict "authority" (dict "crt" $authority.Cert "key" $authority.Key) "server" (dict "crt" $server.Cert "key" $server.Key) }}
{{- end }}
{{- $_ := set .Values "certificates" $made }}
{{- end }}
{{- toJson .Values.certificates }}
{{- end }}

{{/* The certificate of the authority for the webhook, in PEM; empty if it is not known here. */}}
{{- define "nametap.caBundle" -}}
{{- with include "nametap.certificates" . | fromJson }}{{ .authority.crt }}{{ end }}
{{- if .Values.injection.caBundle }}{{ .Values.injection.caBundle }}
{{- else if .Values.discovery.tls.secret }}{{ lookup "v1" "Secret" .Release.Namespace .Values.discovery.tls.secret | default dict | dig "data" "ca.crt" "" | b64dec }}
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
{{- range $name := list "config-dir" "kubeconfig" "tls-client-ca" }}
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
  "discovery" "discovery.enabled" "discovery.tls" "discovery.tls.secret" "discovery.tls.certManager" "discovery.serviceAccount" "discovery.serviceAccount.create" "discovery.serviceAccount.name"
  "discovery.monitor" "discovery.monitor.kind" "discovery.monitor.interval" "discovery.replicas" "discovery.plaintext" "discovery.priorityClassName"
  "discovery.networkPolicy" "discovery.networkPolicy.enabled" "discovery.networkPolicy.apiServerPorts"
  "injection" "injection.webhook" "injection.caBundle" "injection.mode" "injection.controlPlane" "injection.rootCert" "injection.extraRoots" "injection.clusterID" "injection.clusterDomain"
  "injection.monitor" "injection.monitor.kind" "injection.monitor.interval" }}
{{- $value := $values }}
{{- range $key := splitList "." $path }}
{{- $value = index $value $key }}
{{- if kindIs "invalid" $value }}
{{- fail (printf "%s is null: leave it out to have its default; in an upgrade, use --reset-then-reuse-values instead of --reuse-values" $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses requests above their limits: .path names .resources. */}}
{{- define "nametap.checkResources" -}}
{{- range $name, $request := .resources.requests }}
{{- $limit := index ($.resources.limits | default dict) $name }}
{{- if $limit }}
{{- if gt (include "nametap.quantity" $request | float64) (include "nametap.quantity" $limit | float64) }}
{{- fail (printf "%s.requests.%s is %s, above its limit %s: lower it, or raise %s.limits.%s" $.path $name (include "nametap.text" $request) (include "nametap.text" $limit) $.path $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The number that a quantity is, such as 0.01 for 10m. */}}
{{- define "nametap.quantity" -}}
{{- $text := include "nametap.text" . }}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 }}
{{- mulf (regexFind "^[0-9.]+(e[+]?[0-9]+)?" $text | float64) (index $units (regexFind "[A-Za-z]+$" $text) | default 1) }}
{{- end }}

{{/* The labels by which a Service of the release is found, in JSON. */}}
{{- define "nametap.selectorLabels" -}}
{{- dict "app.kubernetes.io/name" "nametap" "app.kubernetes.io/instance" .Release.Name "app.kubernetes.io/component" "nametap-discovery" | toJson }}
{{- end }}

{{/* The labels of pods, in JSON. No selector has them, because a Deployment's selector cannot change. */}}
{{- define "nametap.podLabels" -}}
{{- merge (include "nametap.selectorLabels" . | fromJson) (dict "app.kubernetes.io/version" .Chart.AppVersion) | toJson }}
{{- end }}

{{/* The labels of all objects, in JSON. */}}
{{- define "nametap.labels" -}}
{{- merge (include "nametap.podLabels" . | fromJson) (dict "app.kubernetes.io/managed-by" .Release.Service "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")) | toJson }}
{{- end }}

{{/* The service account of nametap-discovery. */}}
{{- define "nametap.account" -}}
{{- .Values.discovery.serviceAccount.name | default "nametap-discovery" }}
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

{{/* The ConfigMap with the root certificate of the control plane, which istiod writes; empty if pods get the one of
nametap-discovery of this release. For another control plane, injection.rootCert must name it. */}}
{{- define "nametap.rootCert" -}}
{{- $controlPlane := include "nametap.controlPlane" . }}
{{- if .Values.injection.rootCert }}{{ .Values.injection.rootCert }}
{{- else if include "nametap.ownControlPlane" . }}
{{- else if regexMatch "^istiod(-[a-z0-9-]+)?\\." $controlPlane }}istio-ca-root-cert
{{- else }}{{ fail (printf "injection.controlPlane is %q, which is neither nametap-discovery of this release nor istiod: set injection.rootCert to the ConfigMap, in the namespaces of the pods, with its root certificate" $controlPlane) }}
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

{{/* The namespaces that are never injected, in JSON. The namespace of the release is one, because its pods must not
wait for themselves. */}}
{{- define "nametap.ignoredNamespaces" -}}
{{- append (.Values.injection.ignoredNamespaces | default list) .Release.Namespace | uniq | toJson }}
{{- end }}
