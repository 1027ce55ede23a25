package inject

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// encode returns the tree of a value: of the structs of this package, of texts and of lists of them. It is what
// [yaml.Node.Encode] returns, which writes the value as text and parses that, and was most of the work of the
// webhook.
func encode(v any) (*yaml.Node, error) { return treeOf(reflect.ValueOf(v)) }

// ambiguous matches texts that YAML 1.1 takes for something else, and YAML 1.2 does not. They are quoted.
var ambiguous = regexp.MustCompile(`^(?:[yY]|[nN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)$`)

func treeOf(v reflect.Value) (*yaml.Node, error) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null"}, nil
		}
		return treeOf(v.Elem())
	case reflect.String:
		return treeOfText(v.String()), nil
	case reflect.Int:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatInt(v.Int(), 10)}, nil
	case reflect.Bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: strconv.FormatBool(v.Bool())}, nil
	case reflect.Slice:
		return treeOfSlice(v)
	case reflect.Struct:
		return treeOfStruct(v)
	case reflect.Map:
		if m, ok := v.Interface().(map[string]string); ok {
			return treeOfMap(m), nil
		}
	}
	return nil, fmt.Errorf("encoding a %s: want a struct, a list, a map of texts or a text", v.Type())
}

func treeOfText(text string) *yaml.Node {
	node := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	if ambiguous.MatchString(text) {
		node.Style = yaml.DoubleQuotedStyle
	}
	return node
}

func treeOfSlice(v reflect.Value) (*yaml.Node, error) {
	node := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for i := range v.Len() {
		element, err := treeOf(v.Index(i))
		if err != nil {
			return nil, err
		}
		node.Content = append(node.Content, element)
	}
	if len(node.Content) == 0 {
		node.Style = yaml.FlowStyle
	}
	return node, nil
}

func treeOfStruct(v reflect.Value) (*yaml.Node, error) {
	node := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for i := range v.NumField() {
		name, option, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		field := v.Field(i)
		if option == "omitempty" && (field.IsZero() || field.Kind() == reflect.Slice && field.Len() == 0) {
			continue
		}
		value, err := treeOf(field)
		if err != nil {
			return nil, err
		}
		node.Content = append(node.Content, treeOfText(name), value)
	}
	if len(node.Content) == 0 {
		node.Style = yaml.FlowStyle
	}
	return node, nil
}

func treeOfMap(m map[string]string) *yaml.Node {
	node := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		node.Content = append(node.Content, treeOfText(key), treeOfText(m[key]))
	}
	return node
}
