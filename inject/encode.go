package inject

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// ambiguous matches texts that YAML 1.1 takes for something else, and YAML 1.2 does not. They are quoted.
var ambiguous = regexp.MustCompile(`^(?:[yY]|[nN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)$`)

// encode returns the tree of a value: of Kubernetes' types, of texts and of lists of them. [yaml.Node.Encode]
// knows nothing of JSON's names for their fields.
func encode(v any) (*yaml.Node, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding a %T: %w", v, err)
	}
	node, err := readJSON(text, math.MaxInt, math.MaxInt)
	if err != nil {
		return nil, fmt.Errorf("encoding a %T: %w", v, err)
	}
	visit(node, func(n *yaml.Node) {
		n.Line = 0
		switch {
		case n.Tag == "!!str" && ambiguous.MatchString(n.Value):
			n.Style = yaml.DoubleQuotedStyle
		case n.Kind != yaml.ScalarNode && len(n.Content) == 0:
			n.Style = yaml.FlowStyle
		}
	})
	return node, nil
}
