package inject

import (
	"fmt"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// An expression is one of CEL, which is written as a block.
type expression string

// MarshalYAML returns the block.
func (e expression) MarshalYAML() (any, error) {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.LiteralStyle, Value: string(e)}, nil
}

// quote returns a text as a literal of CEL.
func quote(text string) string { return strconv.QuoteToASCII(text) }

// texts returns a list of texts as a literal of CEL.
func texts(list []string) string {
	var quoted []string
	for _, s := range list {
		quoted = append(quoted, quote(s))
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// numbers returns a list of numbers as a literal of CEL.
func numbers(list []int) string { return strings.ReplaceAll(fmt.Sprint(list), " ", ", ") }

// upstreamMark stands for the nameservers of a pod where its settings are made.
const upstreamMark = "\x00upstreams"

// literal returns a tree as an expression of CEL. Values are dyn, because Kubernetes' CEL permits no
// literals of mixed types. In place of env it has the variable of that name.
func literal(node *yaml.Node) string {
	switch {
	case node.Kind == yaml.ScalarNode && node.Value == upstreamMark:
		return "dyn(variables.upstreams)"
	case node.Kind == yaml.ScalarNode && node.ShortTag() == "!!str":
		return "dyn(" + quote(node.Value) + ")"
	case node.Kind == yaml.ScalarNode:
		return "dyn(" + node.Value + ")" // a number, true or false
	case node.Kind == yaml.SequenceNode:
		var list []string
		for _, element := range node.Content {
			list = append(list, literal(element))
		}
		return "dyn([" + strings.Join(list, ", ") + "])"
	}
	var fields []string
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i].Value, literal(node.Content[i+1])
		if key == "env" {
			value = "dyn(variables.env)"
		}
		fields = append(fields, quote(key)+": "+value)
	}
	return "dyn({" + strings.Join(fields, ", ") + "})"
}

// literalOf returns a value as an expression of CEL.
func literalOf(v any) (string, error) {
	node, err := encode(v)
	if err != nil {
		return "", err
	}
	return literal(node), nil
}

// choice returns the expression of one of two values.
func choice(condition, yes, no string) string {
	if yes == no {
		return yes
	}
	return condition + " ? " + yes + " : " + no
}

// A celMutation is what a MutatingAdmissionPolicy changes.
type celMutation struct {
	variables  []celVariable
	expression expression // of a list of JSONPatch
}

// mutation returns the changes of newEdits.
func mutation(cfg Config) (m celMutation, err error) {
	add := func(name, text string) { m.variables = append(m.variables, celVariable{name, expression(text)}) }
	if cfg.Mode == Resolv {
		cluster := `variables.ownPolicy != "None"`
		add("upstreams", `((`+cluster+` ? `+texts(cfg.Nameservers)+` : []) + variables.ownNameservers).distinct().join(",")`)
		add("options", `(`+cluster+` && !variables.ownOptions.exists(o, o.split(":")[0] == "ndots") ? [`+quote(clusterNdots().String())+`] : []) + variables.ownOptions`)
	} else {
		add("searches", `variables.ownSearches`)
		add("options", `variables.ownOptions`)
	}
	env, err := environmentExpression(cfg)
	if err != nil {
		return m, err
	}
	add("env", env)
	added, names, err := addedContainers(cfg)
	if err != nil {
		return m, err
	}
	addedVolumes, err := literalOf(volumes(cfg))
	if err != nil {
		return m, err
	}
	sysctls := `variables.ownSysctls.map(s, dyn(s))`
	status := quote(status{mode: cfg.Mode, initContainers: names, volumes: volumeNames()}.String())
	if cfg.Mode == Resolv {
		missing := `!variables.ownSysctls.exists(s, s.name in ` + texts(lowPortsNames()) + `)`
		added, err := literalOf(sysctl{lowPorts, strconv.Itoa(plainDNS)})
		if err != nil {
			return m, err
		}
		sysctls += ` + (` + missing + ` ? [` + added + `] : [])`
		status = `([` + status + `] + (` + missing + ` ? [` + quote("sysctls="+lowPorts) + `] : []) + ` +
			statusPart("clusterSearches", "nextClusterSearches") + ` + ` + statusPart("nameservers", "ownNameservers") + ` + ` + statusPart("searches", "ownSearches") + ` + ` +
			`(variables.ownPolicy != "" ? ["dnsPolicy=" + variables.ownPolicy] : []) + ` + statusPart("options", "ownOptions") + `).join(";")`
	}
	add("sysctls", sysctls)
	add("status", status)
	add("kept", `variables.initContainers.filter(c, !(c.name in variables.previousContainers))`)
	m.expression = expression("variables.wanted && variables.refusal == \"\" ? (\n" + strings.Join([]string{
		op("add", `"/spec/initContainers"`, `[`+strings.Join(added, ", ")+`] + variables.kept.map(c, dyn(c))`),
		op("add", `"/spec/volumes"`, `object.spec.?volumes.orValue([]).filter(v, !(v.name in variables.previousVolumes)).map(v, dyn(v)) + `+addedVolumes),
		`(variables.istio ? ` + captureOff("containers", "containers", 0) + ` + ` + captureOff("kept", "initContainers", len(added)) + ` : [])`,
		sysctlPatch(),
		dnsPatch(cfg),
		`(has(object.metadata.annotations) ? [] : ` + op("add", `"/metadata/annotations"`, `{}`) + `)`,
		op("add", `"/metadata/annotations/" + jsonpatch.escapeKey(`+quote(Status)+`)`, "variables.status"),
	}, " +\n") + "\n) : []")
	return m, nil
}

// op returns a list with one operation of a JSON patch.
func op(name, path, value string) string {
	if value != "" {
		value = ", value: " + value
	}
	return fmt.Sprintf(`[JSONPatch{op: %q, path: %s%s}]`, name, path, value)
}

// statusPart returns a list with the part of the annotation for a variable; it is empty if that is.
func statusPart(key, name string) string {
	return fmt.Sprintf(`(variables.%[2]s.size() > 0 ? [%[1]s + variables.%[2]s.join(",")] : [])`, quote(key+"="), name)
}

// environmentExpression returns the expression of the settings of the containers.
func environmentExpression(cfg Config) (string, error) {
	var cases [2]string
	for i, istio := range []bool{false, true} {
		var lists [2]string
		for j, address := range []bool{false, true} {
			list, err := literalOf(environment(podWith(istio, address), []string{upstreamMark}, cfg))
			if err != nil {
				return "", err
			}
			lists[j] = list
		}
		cases[i] = "(" + choice(`variables.annotations[?`+quote(proxyConfig)+`].orValue("").matches(`+quote(discoveryAddress)+`)`, lists[1], lists[0]) + ")"
	}
	return choice("variables.istio", cases[1], cases[0]), nil
}

// addedContainers returns the expressions of the containers that are added, and their names.
func addedContainers(cfg Config) (expressions, names []string, err error) {
	var agents [2]string
	for i, istio := range []bool{false, true} {
		if agents[i], err = literalOf(agentContainer(podWith(istio, false), nil, cfg)); err != nil {
			return nil, nil, err
		}
	}
	expressions, names = []string{"(variables.istio ? " + agents[1] + " : " + agents[0] + ")"}, []string{agentName}
	if cfg.Mode == Rules {
		capture, err := literalOf(captureContainer(nil, cfg))
		if err != nil {
			return nil, nil, err
		}
		expressions, names = append(expressions, capture), append(names, captureName)
	}
	return expressions, names, nil
}

// captureOff returns the operations that switch off the DNS capture of Istio's containers in a variable,
// whose containers are in a field from an index on.
func captureOff(variable, field string, from int) string {
	const off = `dyn({"name": dyn("` + dnsCapture + `"), "value": dyn("false")})`
	path := fmt.Sprintf(`"/spec/%s/" + string(i + %d) + "/env`, field, from)
	return `variables.` + variable + `.transformList(i, c, c.name in ` + texts([]string{istioProxy, istioInit}) + `, ` +
		`c.?env.orValue([]).exists(e, e.name == "` + dnsCapture + `") ? ` +
		`c.env.transformList(j, e, e.name == "` + dnsCapture + `", JSONPatch{op: "replace", path: ` + path + `/" + string(j), value: ` + off + `}) : ` +
		`c.?env.orValue([]).size() == 0 ? ` + op("add", path+`"`, `[`+off+`]`) + ` : ` + op("add", path+`/-"`, off) + `).flatten()`
}

// sysctlPatch returns the operations of applySysctls.
func sysctlPatch() string {
	return `(variables.sysctls.size() == 0 && variables.previousSysctls.size() == 0 ? [] : ` +
		`variables.sysctls.size() == 0 ? (has(object.spec.securityContext) && has(object.spec.securityContext.sysctls) ? ` + op("remove", `"/spec/securityContext/sysctls"`, "") + ` : []) : ` +
		`has(object.spec.securityContext) ? ` + op("add", `"/spec/securityContext/sysctls"`, "variables.sysctls") + ` : ` +
		op("add", `"/spec/securityContext"`, `{"sysctls": variables.sysctls}`) + `)`
}

// dnsPatch returns the operations of applyDNS.
func dnsPatch(cfg Config) string {
	options := `variables.options.map(o, o.contains(":") ? {"name": dyn(o.split(":", 2)[0]), "value": dyn(o.split(":", 2)[1])} : {"name": dyn(o)})`
	config := func(nameservers string) string {
		return op("add", `"/spec/dnsConfig"`, `{"nameservers": dyn(`+nameservers+`), "searches": dyn(variables.searches), "options": dyn(`+options+`)}`)
	}
	if cfg.Mode == Resolv {
		return op("add", `"/spec/dnsPolicy"`, `"None"`) + ` + ` + config(`[`+quote(loopback)+`]`)
	}
	return `(variables.wasResolv ? ` +
		`(variables.ownPolicy != "" ? ` + op("add", `"/spec/dnsPolicy"`, `variables.ownPolicy`) + ` : has(object.spec.dnsPolicy) ? ` + op("remove", `"/spec/dnsPolicy"`, "") + ` : []) + ` +
		`(variables.ownNameservers.size() + variables.ownSearches.size() + variables.ownOptions.size() > 0 ? ` + config(`variables.ownNameservers`) +
		` : has(object.spec.dnsConfig) ? ` + op("remove", `"/spec/dnsConfig"`, "") + ` : []) : [])`
}
