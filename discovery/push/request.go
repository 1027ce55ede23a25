package push

import (
	"encoding/binary"
	"errors"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// The variants of ADS: state-of-the-world and incremental.
const (
	variantSotw  = "sotw"
	variantDelta = "delta"
)

const (
	// MaxMessage bounds a request, in bytes. Istio's agent forwards the requests of its Envoy, and they may name all
	// resources that the Envoy has.
	MaxMessage = 4 << 20
	// maxUnnamed bounds the size of a request, in bytes, not counting the names of resources.
	maxUnnamed = 64 << 10
	// maxToken bounds texts that are only compared with texts of this server. Those are shorter, so a longer text
	// equals none of them.
	maxToken = 256
	// frameHead is the length of the header that gRPC puts before each message.
	frameHead = 5
)

// A Request has the fields of a DiscoveryRequest or DeltaDiscoveryRequest that are used. [Codec] decodes these and
// copies nothing else, because a client may send 4 MiB of names, or metadata that would take 30 times its size in
// memory.
type Request struct {
	delta bool // it is a DeltaDiscoveryRequest
	bytes int  // number of bytes that the request has taken of the stream

	node         *corev3.Node // the fields that are used; nil in most requests after the first of a stream
	typeURL      string
	nonce        string // of the push that it answers; empty for none
	rejected     bool   // it rejects that push
	reason       string // why it rejects the push
	names        bool   // it names resources: the requested ones, in the incremental variant the added ones
	removesAll   bool   // it unsubscribes from all resources
	removesTable bool   // it unsubscribes from the table, which is the resource without a name
	version      string // version of the table that the client has, at the start of an incremental stream
	err          error  // why the request is refused; nil if it is not
}

// Bytes returns the size of the request in the stream, in bytes, with the header of gRPC.
func (r *Request) Bytes() int { return r.bytes }

// A part says what a field of a request contains.
type part int

const (
	partUnused part = iota
	partNode
	partType
	partNonce
	partRejection
	partNames
	partRemoved
	partVersions
)

// decode decodes the request. If the request cannot be used, r.err says why: gRPC would hide an error of a codec.
func (r *Request) decode(data mem.BufferSlice) {
	r.bytes = data.Len() + frameHead
	w := wire{data.Reader()}
	defer func() { _ = w.Close() }() // it returns nil
	named := 0
	err := w.eachField(data.Len(), func(n protowire.Number, size int) error {
		p := r.part(n)
		if p == partNames || p == partRemoved || p == partVersions {
			named += 1 + protowire.SizeBytes(size) // with the tag
		}
		return r.readPart(w, p, size)
	})
	if err == nil && data.Len()-named > maxUnnamed {
		err = fmt.Errorf("%d bytes besides the names of resources: want at most %d", data.Len()-named, maxUnnamed)
	}
	if err != nil {
		r.err = refuse("request: %v", err)
	}
}

// part returns what the field with number n contains. The variants of ADS number their fields differently.
func (r *Request) part(n protowire.Number) part {
	parts := []part{2: partNode, 3: partNames, 4: partType, 5: partNonce, 6: partRejection}
	if r.delta {
		parts = []part{1: partNode, 2: partType, 3: partNames, 4: partRemoved, 5: partVersions, 6: partNonce, 7: partRejection}
	}
	if int(n) >= len(parts) {
		return partUnused
	}
	return parts[n]
}

// wildcard is the name of all resources. A first request without names means the same.
const wildcard = "*"

// readPart reads a field that contains the part p of a request, and keeps what is used of it.
func (r *Request) readPart(w wire, p part, size int) (err error) {
	switch p {
	case partNode:
		r.node, err = w.node(size)
	case partType:
		r.typeURL = w.text(size, maxToken)
	case partNonce:
		r.nonce = w.text(size, maxToken)
	case partRejection:
		r.rejected = true
		err = w.eachField(size, func(n protowire.Number, size int) error {
			if n == fieldStatusMessage {
				r.reason = w.text(size, maxForeign+1)
			}
			return nil
		})
	case partNames:
		r.names = true
	case partRemoved:
		name := w.text(size, len(wildcard)+1)
		r.removesAll, r.removesTable = r.removesAll || name == wildcard, r.removesTable || name == ""
	case partVersions:
		err = r.readVersion(w, size)
	case partUnused:
	}
	return err
}

// readVersion reads the version of a resource, and keeps it if the resource has no name. There may be many other
// resources, with long names.
func (r *Request) readVersion(w wire, size int) error {
	unnamed, version := true, ""
	err := w.eachField(size, func(n protowire.Number, size int) error {
		switch n {
		case fieldKey:
			unnamed = size == 0
		case fieldValue:
			version = w.text(size, maxToken)
		}
		return nil
	})
	if unnamed {
		r.version = version
	}
	return err
}

// Field numbers of the messages in a request: google.rpc.Status, Envoy's Node, and protobuf's Struct and map entries.
const (
	fieldStatusMessage = 2
	fieldNodeID        = 1
	fieldMetadata      = 3
	fieldAgentName     = 6
	fieldAgentVersion  = 7
	fieldFields        = 1
	fieldKey           = 1
	fieldValue         = 2
)

// A wire reads a message of protobuf that may be in several buffers.
type wire struct{ *mem.Reader }

var errMalformed = errors.New("malformed message of protobuf")

// eachField calls the function handle for each length-delimited field in the next n bytes. It skips the bytes of the
// field that the function has not read.
func (w wire) eachField(n int, handle func(field protowire.Number, size int) error) error {
	for end := w.Remaining() - n; w.Remaining() > end; {
		tag, err := binary.ReadUvarint(w)
		if err != nil {
			return errMalformed
		}
		field, kind := protowire.DecodeTag(tag)
		size := uint64(0)
		switch kind {
		case protowire.VarintType:
			_, err = binary.ReadUvarint(w)
		case protowire.Fixed32Type:
			size = 4
		case protowire.Fixed64Type:
			size = 8
		case protowire.BytesType:
			size, err = binary.ReadUvarint(w)
		default:
			err = errMalformed
		}
		if err != nil || field < protowire.MinValidNumber || w.Remaining() < end || size > uint64(w.Remaining()-end) { //nolint:gosec // not negative
			return errMalformed
		}
		next := w.Remaining() - int(size) //nolint:gosec // at most what remains
		if kind == protowire.BytesType {
			if err := handle(field, int(size)); err != nil { //nolint:gosec // at most what remains
				return err
			}
		}
		if _, err := w.Discard(w.Remaining() - next); err != nil {
			return errMalformed
		}
	}
	return nil
}

// bytes reads bytes.
func (w wire) bytes(size int) []byte {
	data := make([]byte, size)
	n, _ := w.Read(data) // at least size bytes are left
	return data[:n]
}

// text reads a text. The parameter size is its length; at most bound bytes of it are read.
func (w wire) text(size, bound int) string { return string(w.bytes(min(size, bound))) }

// node reads a node.
func (w wire) node(size int) (*corev3.Node, error) {
	if size > maxUnnamed {
		return nil, fmt.Errorf("the node has %d bytes: want at most %d", size, maxUnnamed)
	}
	node := &corev3.Node{Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{}}}
	err := w.eachField(size, func(n protowire.Number, size int) error {
		switch n {
		case fieldNodeID:
			node.Id = w.text(size, maxNodeID+1)
		case fieldAgentName:
			node.UserAgentName = w.text(size, maxSoftware)
		case fieldAgentVersion:
			node.UserAgentVersionType = &corev3.Node_UserAgentVersion{UserAgentVersion: w.text(size, maxSoftware)}
		case fieldMetadata:
			return w.eachField(size, func(n protowire.Number, size int) error {
				if n == fieldFields {
					return w.metadata(size, node.GetMetadata().GetFields())
				}
				return nil
			})
		}
		return nil
	})
	return node, err
}

// metadata reads a key of the metadata and its value. If the key is used, it adds both to the given map. Encoders write
// the key before the value.
func (w wire) metadata(size int, to map[string]*structpb.Value) error {
	key := ""
	return w.eachField(size, func(n protowire.Number, size int) error {
		switch {
		case n == fieldKey:
			key = w.text(size, maxToken)
		case n == fieldValue && isUsed(key):
			value := new(structpb.Value)
			if err := proto.Unmarshal(w.bytes(size), value); err != nil {
				return errMalformed
			}
			to[key] = value
		}
		return nil
	})
}
