package nds

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The snapshot file has, in this order:
//
//   - magic
//   - the time of the last push: nanoseconds since 1970, 8 bytes big endian. The checksum does not cover
//     the time, because a push that changes nothing overwrites only the time.
//   - the SHA-256 of the next two parts
//   - the length of the base, 8 bytes big endian
//   - the base: a DeltaDiscoveryResponse with the table. Its control plane identifier is the owner.
//   - the log
//
// If the table came as changes, the base has one change that makes the table out of an empty table, and the nonce
// of the DeltaDiscoveryResponse is the fingerprint of the node. The log then has a record for each later change
// that was sent to the same node. If the table came whole, the log is empty.
const (
	snapshotFamily = "nametap"
	snapshotMagic  = snapshotFamily + "\x04"
	snapshotSum    = len(snapshotMagic) + 8
	snapshotHead   = snapshotSum + sha256.Size
	snapshotBase   = snapshotHead + 8

	// The log may be as long as minLog, or half as long as the base if that is more.
	minLog = 64 << 10
)

// snapshot is the content of the snapshot file.
type snapshot struct {
	owner   string
	version string
	pushed  time.Time
	table   *hostTable
	node    string // see receiver.tableNode
}

// snapshotOwner identifies the nodes that may use a snapshot. They are in the same namespace of the same cluster,
// because other nodes get other tables.
func snapshotOwner(n Node) string { return n.Namespace + "/" + n.ClusterID }

// marshal returns the parts of the snapshot file. Most parts are the shards of the table. marshal does not join the
// parts, because that would copy the whole table.
func (s snapshot) marshal() ([][]byte, error) {
	m := &discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: s.version,
		TypeUrl:           TypeURL,
		ControlPlane:      &corev3.ControlPlane{Identifier: s.owner},
		Nonce:             s.node,
	}
	table, err := s.table.marshal()
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	data := make([]byte, snapshotBase, snapshotBase+proto.Size(m))
	copy(data, snapshotMagic)
	binary.BigEndian.PutUint64(data[len(snapshotMagic):], uint64(s.pushed.UnixNano()))
	if data, err = (proto.MarshalOptions{Deterministic: true}).MarshalAppend(data, m); err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	size := totalLen(table)
	data = appendResource(data, size)
	binary.BigEndian.PutUint64(data[snapshotHead:], uint64(len(data)-snapshotBase+size)) //nolint:gosec // not negative
	sum := sha256.New()
	sum.Write(data[snapshotHead:])
	for _, part := range table {
		sum.Write(part)
	}
	copy(data[snapshotSum:], sum.Sum(nil))
	return append([][]byte{data}, table...), nil
}

// appendResource appends to a DeltaDiscoveryResponse the start of a resource without a name, up to its
// NameTable of size bytes.
func appendResource(response []byte, size int) []byte {
	const (
		fieldResources protowire.Number = 2 // of the DeltaDiscoveryResponse
		fieldResource  protowire.Number = 2 // of the Resource
		fieldTypeURL   protowire.Number = 1 // of the Any
		fieldValue     protowire.Number = 2 // of the Any
	)
	body := protowire.AppendString(protowire.AppendTag(nil, fieldTypeURL, protowire.BytesType), TypeURL)
	body = protowire.AppendVarint(protowire.AppendTag(body, fieldValue, protowire.BytesType), uint64(size)) //nolint:gosec // not negative
	resource := protowire.AppendVarint(protowire.AppendTag(nil, fieldResource, protowire.BytesType), uint64(len(body)+size))
	resource = append(resource, body...)
	response = protowire.AppendVarint(protowire.AppendTag(response, fieldResources, protowire.BytesType), uint64(len(resource)+size))
	return append(response, resource...)
}

// totalLen returns the length of all parts together.
func totalLen(parts [][]byte) (n int) {
	for _, part := range parts {
		n += len(part)
	}
	return n
}

// A savedTable is the parsed content of a snapshot file.
type savedTable struct {
	snapshot
	// unused is the length of the part of the log that is not used: the first record that is incomplete or damaged, and
	// all records after it.
	unused int
}

// parseSnapshot parses the content of a snapshot file.
func parseSnapshot(data []byte) (savedTable, error) {
	switch {
	case !bytes.HasPrefix(data, []byte(snapshotFamily)):
		return savedTable{}, errors.New("it is not a snapshot of nametap")
	case !bytes.HasPrefix(data, []byte(snapshotMagic)) && len(data) > len(snapshotFamily):
		return savedTable{}, errors.New("it is a snapshot of another version of nametap")
	case len(data) < snapshotBase || binary.BigEndian.Uint64(data[snapshotHead:]) > uint64(len(data)-snapshotBase):
		return savedTable{}, fmt.Errorf("it is damaged: %d bytes are too few for its base", len(data))
	}
	end := snapshotBase + int(binary.BigEndian.Uint64(data[snapshotHead:])) //nolint:gosec // at most the length
	if want := sha256.Sum256(data[snapshotHead:end]); !bytes.Equal(data[snapshotSum:snapshotHead], want[:]) {
		return savedTable{}, errors.New("it is damaged: the checksum is wrong")
	}
	m := &discoveryv3.DeltaDiscoveryResponse{}
	if err := proto.Unmarshal(data[snapshotBase:end], m); err != nil {
		return savedTable{}, fmt.Errorf("it is damaged: %w", err)
	}
	s := savedTable{snapshot: snapshot{
		owner:   m.GetControlPlane().GetIdentifier(),
		version: m.GetSystemVersionInfo(),
		node:    m.GetNonce(),
		pushed:  time.Unix(0, int64(binary.BigEndian.Uint64(data[len(snapshotMagic):]))), //nolint:gosec // written by marshal
	}}
	value, _, err := response{typeURL: m.GetTypeUrl(), resources: m.GetResources()}.table()
	if err == nil {
		err = s.setTable(value, data[end:])
	}
	if err != nil {
		return savedTable{}, fmt.Errorf("it is damaged: %w", err)
	}
	return s, nil
}

// setTable sets the table of s: it applies the changes in log to the table in value, a NameTable.
func (s *savedTable) setTable(value, log []byte) error {
	isChange, err := hasChange(value)
	if err != nil {
		return err
	}
	if !isChange {
		s.table, err = wholeTable(value)
		return err
	}
	c, err := parseChange(value)
	if err != nil {
		return err
	}
	s.replay(&c, log)
	s.table, err = new(hostTable).apply(&c)
	return err
}

// replay joins the changes in log to the parameter all, up to the first damaged record. The records after the
// damaged record are useless, because they change a table that is not known.
func (s *savedTable) replay(all *change, log []byte) {
	for len(log) > 0 {
		r, n := parseRecord(log)
		if n == 0 {
			break
		}
		c, err := parseChange(r.change)
		if err != nil {
			break
		}
		all.join(c)
		s.version = r.version
		if r.pushed.After(s.pushed) { // otherwise s.pushed is the time of a later push that changed nothing
			s.pushed = r.pushed
		}
		log = log[n:]
	}
	s.unused = len(log)
}

// A record is a change in the log. It consists of the length of its content, 4 bytes big endian; the
// first 8 bytes of the SHA-256 of the content; and the content. The content is the time of the push, 8 bytes; the
// length of the version as a varint; the version; and the change, a NameTable in wire form.
type record struct {
	pushed  time.Time
	version string
	change  []byte
}

const (
	recordSum  = 4
	recordHead = recordSum + 8
)

// append appends the record to the log.
func (r *record) append(log []byte) []byte {
	start := len(log)
	log = append(log, make([]byte, recordHead)...)
	log = binary.BigEndian.AppendUint64(log, uint64(r.pushed.UnixNano()))
	log = append(binary.AppendUvarint(log, uint64(len(r.version))), r.version...)
	log = append(log, r.change...)
	content := log[start+recordHead:]
	binary.BigEndian.PutUint32(log[start:], uint32(len(content))) //nolint:gosec // a push is below 4 GiB
	sum := sha256.Sum256(content)
	copy(log[start+recordSum:], sum[:recordHead-recordSum])
	return log
}

// parseRecord parses the record at the start of log. length is 0 if the record is damaged.
func parseRecord(log []byte) (r record, length int) {
	if len(log) < recordHead {
		return record{}, 0
	}
	n := uint64(binary.BigEndian.Uint32(log))
	if n > uint64(len(log)-recordHead) {
		return record{}, 0
	}
	content := log[recordHead:][:n]
	if sum := sha256.Sum256(content); !bytes.Equal(sum[:recordHead-recordSum], log[recordSum:recordHead]) || n < 8 {
		return record{}, 0
	}
	r.pushed = time.Unix(0, int64(binary.BigEndian.Uint64(content)))
	versionLen, used := binary.Uvarint(content[8:])
	if rest := content[8+max(0, used):]; used > 0 && versionLen <= uint64(len(rest)) {
		r.version, r.change = string(rest[:versionLen]), rest[versionLen:]
		return r, recordHead + int(n) //nolint:gosec // at most the length of the log
	}
	return record{}, 0
}
