package inject

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// PolicyName is the name of the objects of Policy.
const PolicyName = "nametap-inject"

// Policy returns a MutatingAdmissionPolicy that makes the changes of Pod, a ValidatingAdmissionPolicy
// that rejects the pods that Pod refuses, and their bindings, in YAML. The API server evaluates them, so
// that there is no webhook. They need Kubernetes 1.36.
func Policy(cfg Config) ([]byte, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	shared := slices.Concat(decision(cfg), refusals(cfg))
	changes, err := mutation(cfg)
	if err != nil {
		return nil, err
	}
	all := []any{
		policyObject("MutatingAdmissionPolicy", map[string]any{
			"failurePolicy": "Fail", "reinvocationPolicy": "IfNeeded", "matchConstraints": matchConstraints(cfg), "matchConditions": matchConditions(),
			"variables": slices.Concat(shared, changes.variables),
			"mutations": []any{map[string]any{"patchType": "JSONPatch", "jsonPatch": map[string]any{"expression": changes.expression}}},
		}),
		policyObject("MutatingAdmissionPolicyBinding", map[string]any{"policyName": PolicyName}),
		policyObject("ValidatingAdmissionPolicy", map[string]any{
			"failurePolicy": "Fail", "matchConstraints": matchConstraints(cfg), "matchConditions": matchConditions(), "variables": shared,
			"validations": []any{
				map[string]any{
					"expression": expression(`!variables.wanted || variables.refusal == ""`), "reason": "Forbidden",
					"message": "nametap cannot be added to this pod", "messageExpression": expression(`"nametap cannot be added to this pod: " + ` + shortRefusal),
				},
				map[string]any{
					"expression": expression(`!variables.wanted || variables.refusal != "" || variables.hasStatus`), "reason": "Forbidden",
					"message": "nametap was not added to this pod: create the MutatingAdmissionPolicy " + PolicyName + " and its binding, or remove the ValidatingAdmissionPolicy of this name",
				},
			},
		}),
		policyObject("ValidatingAdmissionPolicyBinding", map[string]any{"policyName": PolicyName, "validationActions": []string{"Deny"}}),
	}
	var out strings.Builder
	out.WriteString("# Printed by `nametap-discovery inject policy`. docs/injection.md explains it.\n")
	for i, object := range all {
		if i > 0 {
			out.WriteString("---\n")
		}
		encoder := yaml.NewEncoder(&out)
		encoder.SetIndent(2)
		encoder.CompactSeqIndent()
		if err := encoder.Encode(object); err != nil {
			return nil, fmt.Errorf("writing the policies: %w", err)
		}
	}
	return []byte(out.String()), nil
}

// shortRefusal is the refusal in one line of a limited length: the API server uses no other messages.
const shortRefusal = `(variables.refusal.size() > 1000 ? variables.refusal.substring(0, 1000) + "..." : variables.refusal).replace("\n", " ")`

func policyObject(kind string, spec any) any {
	return struct {
		APIVersion string            `yaml:"apiVersion"`
		Kind       string            `yaml:"kind"`
		Metadata   map[string]string `yaml:"metadata"`
		Spec       any               `yaml:"spec"`
	}{"admissionregistration.k8s.io/v1", kind, map[string]string{"name": PolicyName}, spec}
}

// matchConstraints select the pods that may be injected.
func matchConstraints(cfg Config) any {
	type requirement struct {
		Key      string   `yaml:"key"`
		Operator string   `yaml:"operator"`
		Values   []string `yaml:"values"`
	}
	constraints := map[string]any{
		"resourceRules": []any{map[string]any{"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "operations": []string{"CREATE"}, "resources": []string{"pods"}}},
		"objectSelector": map[string]any{
			"matchExpressions": []requirement{{Label, "NotIn", []string{"false"}}},
		},
	}
	if len(cfg.IgnoredNamespaces) > 0 {
		constraints["namespaceSelector"] = map[string]any{
			"matchExpressions": []requirement{{"kubernetes.io/metadata.name", "NotIn", cfg.IgnoredNamespaces}},
		}
	}
	return constraints
}

// A matchCondition is an expression that is true for the pods that may be injected.
type matchCondition struct {
	Name       string     `yaml:"name"`
	Expression expression `yaml:"expression"`
}

// matchConditions are those of the API server, which can see the pod only. They come before the
// variables, for which an error would refuse the pod.
func matchConditions() []matchCondition {
	return []matchCondition{
		{"not-host-network", `!object.spec.?hostNetwork.orValue(false)`},
		{"not-mirror", expression(`!(` + quote(mirror) + ` in object.metadata.?annotations.orValue({}))`)},
		{"not-windows", expression(`object.spec.?os.?name.orValue("") != "windows" && ![object.spec.?nodeSelector.orValue({})].exists(s, ` + texts(osLabels()) + `.exists(l, s[?l].orValue("") == "windows")) && ` +
			`![object.spec.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms.orValue([])].exists(terms, terms.size() > 0 && ` +
			`terms.all(t, t.?matchExpressions.orValue([]).exists(e, e.key in ` + texts(osLabels()) + ` && e.operator == "In" && e.?values.orValue([]) == ["windows"])))`)},
	}
}

// A celVariable is an expression that others use by its name.
type celVariable struct {
	Name       string     `yaml:"name"`
	Expression expression `yaml:"expression"`
}

// decision is decide, and what it needs to know, for pods for which the matchConditions hold.
func decision(cfg Config) []celVariable {
	return []celVariable{
		{"labels", `object.metadata.?labels.orValue({})`},
		{"annotations", `object.metadata.?annotations.orValue({})`},
		{"initContainers", `object.spec.?initContainers.orValue([])`},
		{"containers", `object.spec.?containers.orValue([])`},
		{"labelled", expression(quote(Label) + ` in variables.labels`)},
		{"badLabel", expression(`variables.labelled && variables.labels[` + quote(Label) + `] != "true"`)},
		{"asked", expression(`variables.labelled || namespaceObject.metadata.?labels[?` + quote(Label) + `].orValue("") == ` + quote(Enabled))},
		{"hasStatus", expression(quote(Status) + ` in variables.annotations`)},
		{"byHand", expression(`!variables.hasStatus && (variables.initContainers + variables.containers).exists(c, c.name in [` + quote(agentName) + `, ` + quote(captureName) + `])`)},
		{"wanted", `variables.asked && (variables.badLabel || !variables.byHand)`},
		{"istio", expression(`(variables.initContainers + variables.containers).exists(c, c.name == ` + quote(istioProxy) + `)`)},
		// The parts of the annotation, which is read by parseStatus.
		{"parts", expression(`variables.hasStatus ? variables.annotations[` + quote(Status) + `].split(";") : []`)},
		{"previousContainers", partsOf("initContainers")},
		{"previousVolumes", partsOf("volumes")},
		{"previousSysctls", partsOf("sysctls")},
		{"wasResolv", expression(`variables.parts.exists(p, p == "mode=` + string(Resolv) + `")`)},
		// ownDNS.
		{"nowPolicy", `object.spec.?dnsPolicy.orValue("")`},
		{"nowNameservers", `object.spec.?dnsConfig.?nameservers.orValue([])`},
		{"nowSearches", `object.spec.?dnsConfig.?searches.orValue([])`},
		{"nowOptions", `object.spec.?dnsConfig.?options.orValue([]).map(o, has(o.value) ? o.name + ":" + o.value : o.name)`},
		{"previousPolicy", expression(string(partsOf("dnsPolicy")) + `.join(",")`)},
		{"previousNameservers", partsOf("nameservers")},
		{"previousSearches", partsOf("searches")},
		{"previousOptions", partsOf("options")},
		{"clusterSearches", partsOf("clusterSearches")},
		{"clusterOptions", expression(`variables.previousPolicy != "None" && !variables.previousOptions.exists(o, o.split(":")[0] == "ndots") ? [` + quote(clusterNdots().String()) + `] : []`)},
		{"ownPolicy", `variables.wasResolv && variables.nowPolicy == "None" ? variables.previousPolicy : variables.nowPolicy`},
		{"ownNameservers", expression(`variables.wasResolv ? variables.previousNameservers + ` +
			`variables.nowNameservers.filter(n, n != ` + quote(loopback) + ` && !(n in variables.previousNameservers)) : variables.nowNameservers`)},
		{"ownSearches", editedExpression("Searches")},
		{"ownOptions", editedExpression("Options")},
		{"ownSysctls", `object.spec.?securityContext.?sysctls.orValue([]).filter(s, !(s.name in variables.previousSysctls))`},
		{"ports", expression(`variables.istio ? ` + numbers(portsOf(podWith(true, false), cfg)) + ` : ` + numbers(portsOf(podWith(false, false), cfg)))},
	}
}

// partsOf returns the expression of the values of a key of the annotation.
func partsOf(key string) expression {
	return expression(fmt.Sprintf(`variables.parts.filter(p, p.startsWith(%s)).map(p, p.substring(%d).split(",")).flatten()`, quote(key+"="), len(key)+1))
}

// editedExpression is edited.
func editedExpression(list string) expression {
	return expression(strings.ReplaceAll(`variables.wasResolv ? variables.previousLIST.filter(v, v in variables.nowLIST) + `+
		`variables.nowLIST.filter(v, !(v in variables.previousLIST) && !(v in variables.clusterLIST)) : variables.nowLIST`, "LIST", list))
}

// podWith returns a pod that differs in what the containers depend on.
func podWith(istio, address bool) *pod {
	p := new(pod)
	if istio {
		p.Spec.Containers = []podContainer{{Name: istioProxy}}
	}
	if address {
		p.Metadata.Annotations = map[string]string{proxyConfig: "discoveryAddress: x:1"}
	}
	return p
}

// statusPattern matches the values that parseStatus accepts, except that it permits keys to be repeated
// and the mode to be missing.
func statusPattern() string {
	const name = agentName + `(-[^,;]*)?`
	part := `(mode=(` + string(Rules) + `|` + string(Resolv) + `)|(initContainers|volumes)=` + name + `(,` + name + `)*|sysctls=` + strings.ReplaceAll(lowPorts, ".", `\.`) +
		`|(clusterSearches|nameservers|searches|dnsPolicy|options)=[^;]+)`
	return `^` + part + `(;` + part + `)*$`
}

// refusals are the reasons of Pod to refuse a pod that is wanted. The texts are those of decide, obstacle
// and newEdits.
func refusals(cfg Config) []celVariable {
	var all []celVariable
	add := func(name, text string) { all = append(all, celVariable{name, expression(text)}) }
	add("statusIsOurs", `!variables.hasStatus || variables.annotations[`+quote(Status)+`].matches(`+quote(statusPattern())+`) && variables.parts.exists(p, p.startsWith("mode=")) && `+
		`variables.parts.all(p, variables.parts.filter(q, q.split("=")[0] == p.split("=")[0]).size() == 1)`)
	add("application", `(variables.initContainers + variables.containers).filter(c, !(c.name in `+texts(istioContainers)+`) && !(c.name in variables.previousContainers))`)
	var user strings.Builder
	if cfg.Mode == Rules {
		for _, id := range []struct{ field, noun string }{{"runAsUser", "user"}, {"runAsGroup", "group"}} {
			fmt.Fprintf(&user, `c.?securityContext.?%[1]s.orValue(object.spec.?securityContext.?%[1]s.orValue(-1)) == %[2]d ? "container \"" + c.name + %[3]s : `, id.field, agentID,
				quote(fmt.Sprintf(`" runs as %[1]s %[2]d (%[3]s), as the agent does, so its queries are not captured: give it another %[1]s, or use the mode %[4]s`, id.noun, agentID, id.field, Resolv)))
		}
	}
	add("obstacles", `variables.application.map(c, `+user.String()+
		`c.?ports.orValue([]).exists(p, p.containerPort in variables.ports) ? "container \"" + c.name + "\" has the port " + `+
		`string(c.ports.filter(p, p.containerPort in variables.ports)[0].containerPort) + ", on which the agent listens: give it another port" : "").filter(m, m != "") + `+
		`(variables.initContainers.filter(c, !(c.name in variables.previousContainers)) + variables.containers).filter(c, c.name in `+texts([]string{agentName, captureName})+`)`+
		`.map(c, "the pod has a container \"" + c.name + "\" that was not injected: give it another name") + `+
		`object.spec.?volumes.orValue([]).filter(v, v.name in `+texts(volumeNames())+` && !(v.name in variables.previousVolumes)).map(v, "the pod has a volume \"" + v.name + "\" that was not injected: give it another name")`)
	resolv := ""
	if cfg.Mode == Resolv {
		services := "svc." + cfg.ClusterDomain
		add("nextClusterSearches", `variables.ownPolicy != "None" ? [request.namespace + `+quote("."+services)+`, `+quote(services)+`, `+quote(cfg.ClusterDomain)+`] : []`)
		add("searches", `(variables.nextClusterSearches + variables.ownSearches).distinct()`)
		resolv = resolvRefusals()
	}
	add("refusal", `variables.badLabel ? "the pod has the label `+Label+`: \"" + variables.labels[`+quote(Label)+`] + "\", want \"true\" or \"false\"" : `+
		`!variables.statusIsOurs ? "annotation `+Status+`: \"" + variables.annotations[`+quote(Status)+`] + "\": this version of nametap did not write it; remove it together with what it lists" : `+
		`variables.obstacles.size() > 0 ? variables.obstacles[0] : `+resolv+`""`)
	return all
}

// canForwardExpression is canForward of the nameserver s.
const canForwardExpression = `isIP(s) && (ip(s).isGlobalUnicast() || ip(s).isLinkLocalUnicast())`

// resolvRefusals are those of mode Resolv.
func resolvRefusals() string {
	return `(variables.ownNameservers + variables.ownSearches + variables.ownOptions).exists(s, s == "" || s.contains(",") || s.contains(";")) ? ` +
		quote(notRepresentable()) + ` : ` +
		`variables.ownNameservers.exists(s, !(` + canForwardExpression + `)) ? "dnsConfig has the nameserver \"" + variables.ownNameservers.filter(s, !(` + canForwardExpression + `))[0] + ` +
		quote(strings.TrimPrefix(notForwarding(""), `dnsConfig has the nameserver "`)) + ` : ` +
		`variables.ownPolicy == "None" && variables.ownNameservers.size() == 0 ? ` + quote(noNameservers) + ` : ` +
		`!(variables.ownPolicy in ["", "ClusterFirst", "ClusterFirstWithHostNet", "None"]) ? ` +
		`"dnsPolicy is " + variables.ownPolicy + ` + quote(strings.TrimPrefix(otherPolicy(""), "dnsPolicy is ")) + ` : ` +
		fmt.Sprintf(`variables.searches.size() > %d || variables.searches.join(" ").size() > %d ? %s : `, maxSearches, maxSearchList, quote(longSearchList())) +
		fmt.Sprintf(`variables.ownSysctls.exists(s, s.name in %[1]s && !(s.value.matches("^[0-9]{1,9}$") && int(s.value) <= %[2]d)) ? `+
			`"the pod sets the sysctl %[3]s to \"" + variables.ownSysctls.filter(s, s.name in %[1]s && !(s.value.matches("^[0-9]{1,9}$") && int(s.value) <= %[2]d))[0].value + %[4]s : `,
			texts(lowPortsNames()), plainDNS, lowPorts, quote(fmt.Sprintf(`", and the agent needs %d or less: change it, or use the mode %s`, plainDNS, Rules)))
}
