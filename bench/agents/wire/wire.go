// Package wire encodes the requests of an agent, and decodes the parts of responses that a
// simulated agent needs, in both variants of ADS.
package wire

import (
	"errors"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// TypeURL is the type of name tables.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// wrapperURL is the type of a resource with a name in a state-of-the-world response.
const wrapperURL = "type.googleapis.com/envoy.service.discovery.v3.Resource"

// A Variant is one of the two protocols of ADS.
type Variant int

// The variants.
const (
	Incremental Variant = iota
	StateOfTheWorld
)

// Method returns the RPC of the variant.
func (v Variant) Method() string {
	const service = "/envoy.service.discovery.v3.AggregatedDiscoveryService/"
	if v == StateOfTheWorld {
		return service + "StreamAggregatedResources"
	}
	return service + "DeltaAggregatedResources"
}

// First returns the first request of a stream. The parameter versions is the result of AppendVersion for each resource
// that the agent has.
func (v Variant) First(node *corev3.Node, versions []byte) ([]byte, error) {
	var m proto.Message = &discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL}
	if v == StateOfTheWorld {
		m = &discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL}
	}
	request, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding the first request: %w", err)
	}
	return append(request, versions...), nil
}

// AppendVersion appends the version of a resource in an incremental request.
func AppendVersion(b []byte, name, version string) []byte {
	const versions, key, value = 5, 1, 2
	return appendBytes(b, versions, appendBytes(appendBytes(nil, key, []byte(name)), value, []byte(version)))
}

// numbers are the field numbers that differ between the variants.
type numbers struct{ version, typeURL, nonce, problem protowire.Number }

func (v Variant) request() numbers {
	if v == StateOfTheWorld {
		return numbers{version: 1, typeURL: 4, nonce: 5, problem: 6}
	}
	return numbers{typeURL: 2, nonce: 6, problem: 7}
}

// AppendAnswer appends the ACK of a response to b. If there is a reason, it appends a NACK with the reason instead.
// version is the version of the last response that was accepted.
func (v Variant) AppendAnswer(b []byte, version, nonce []byte, reason string) []byte {
	n := v.request()
	if n.version != 0 && len(version) > 0 {
		b = appendBytes(b, n.version, version)
	}
	b = appendBytes(b, n.typeURL, []byte(TypeURL))
	b = appendBytes(b, n.nonce, nonce)
	if reason != "" {
		const code, message, invalidArgument = 1, 2, 3
		status := protowire.AppendVarint(protowire.AppendTag(nil, code, protowire.VarintType), invalidArgument)
		b = appendBytes(b, n.problem, appendBytes(status, message, []byte(reason)))
	}
	return b
}

func appendBytes(b []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), value)
}

// A Response has the decoded fields of a response. Its slices are parts of the response.
type Response struct {
	Version, Nonce []byte
	Resources      []Resource
	Removed        []string // names of resources
}

// A Resource is a name table.
type Resource struct {
	Name, Version string
	Table         []byte
}

// Parse decodes a response. It reuses the slices of r.
func (v Variant) Parse(message []byte, r *Response) error {
	const version, resources, nonce, removed = 1, 2, 5, 6 // in both variants
	*r = Response{Resources: r.Resources[:0], Removed: r.Removed[:0]}
	return eachField(message, func(number protowire.Number, value []byte) error {
		switch number {
		case version:
			r.Version = value
		case nonce:
			r.Nonce = value
		case removed:
			if v == Incremental {
				r.Removed = append(r.Removed, string(value))
			}
		case resources:
			var resource Resource
			var err error
			if v == Incremental {
				resource, err = parseResource(value)
			} else {
				resource, err = parseAny(value)
			}
			r.Resources = append(r.Resources, resource)
			return err
		}
		return nil
	})
}

// parseResource decodes a discovery.v3.Resource.
func parseResource(b []byte) (r Resource, err error) {
	err = r.parse(b)
	return r, err
}

// parse decodes fields of a discovery.v3.Resource.
func (r *Resource) parse(b []byte) error {
	const version, body, name = 1, 2, 3
	return eachField(b, func(number protowire.Number, value []byte) error {
		switch number {
		case version:
			r.Version = string(value)
		case name:
			r.Name = string(value)
		case body:
			inner, err := parseAny(value)
			r.Table = inner.Table
			return err
		}
		return nil
	})
}

// parseAny decodes an Any with a table, or with a resource that has a name.
func parseAny(b []byte) (Resource, error) {
	const typeURL, body = 1, 2
	var url string
	var content []byte
	err := eachField(b, func(number protowire.Number, value []byte) error {
		switch number {
		case typeURL:
			url = string(value)
		case body:
			content = value
		}
		return nil
	})
	switch {
	case err != nil:
		return Resource{}, err
	case url == wrapperURL:
		return parseResource(content)
	case url != TypeURL:
		return Resource{}, fmt.Errorf("a resource of type %q: want %q", url, TypeURL)
	}
	return Resource{Table: content}, nil
}

var errMalformed = errors.New("a message that is not in protobuf's wire format")

// eachField calls the function use for each field of a message. value is empty for numbers.
func eachField(b []byte, use func(number protowire.Number, value []byte) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errMalformed
		}
		b = b[n:]
		var value []byte
		if kind == protowire.BytesType {
			value, n = protowire.ConsumeBytes(b)
		} else {
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return errMalformed
		}
		b = b[n:]
		if err := use(number, value); err != nil {
			return err
		}
	}
	return nil
}
