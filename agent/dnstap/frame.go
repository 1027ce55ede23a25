package dnstap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// contentType is the type of the frames' content: messages of dnstap.proto.
const contentType = "protobuf:dnstap.Dnstap"

// The kinds of control frames of Frame Streams.
const (
	controlAccept = 1
	controlStart  = 2
	controlStop   = 3
	controlReady  = 4
	controlFinish = 5
)

const (
	fieldContentType = 1
	maxControl       = 512 // bytes of a control frame
)

// control returns a control frame of a kind. Frames of the kinds READY and START name the content type.
func control(kind uint32) []byte {
	order := binary.BigEndian
	body := order.AppendUint32(nil, kind)
	if kind == controlReady || kind == controlStart {
		body = order.AppendUint32(body, fieldContentType)
		body = order.AppendUint32(body, uint32(len(contentType)))
		body = append(body, contentType...)
	}
	frame := order.AppendUint32(nil, 0) // the escape: a length of 0 begins a control frame
	frame = order.AppendUint32(frame, uint32(len(body)))
	return append(frame, body...)
}

var (
	errNoControl = errors.New("the receiver does not speak Frame Streams")
	errContent   = errors.New("the receiver does not accept dnstap")
)

// readControl reads a control frame, and returns its kind and its content types.
func readControl(r io.Reader) (kind uint32, types []string, err error) {
	var head [12]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	order := binary.BigEndian
	length := order.Uint32(head[4:])
	if order.Uint32(head[:]) != 0 || length < 4 || length > maxControl {
		return 0, nil, errNoControl
	}
	fields := make([]byte, length-4)
	if _, err := io.ReadFull(r, fields); err != nil {
		return 0, nil, err
	}
	for len(fields) > 0 {
		if len(fields) < 8 {
			return 0, nil, errNoControl
		}
		field, size := order.Uint32(fields), order.Uint32(fields[4:])
		if fields = fields[8:]; uint64(size) > uint64(len(fields)) {
			return 0, nil, errNoControl
		}
		if field == fieldContentType {
			types = append(types, string(fields[:size]))
		}
		fields = fields[size:]
	}
	return order.Uint32(head[8:]), types, nil
}

// expect reads a control frame, and returns an error unless the frame is of the given kind. If an ACCEPT frame
// names content types, dnstap must be one of them.
func expect(r io.Reader, kind uint32) error {
	got, types, err := readControl(r)
	if err != nil {
		return err
	}
	switch {
	case got != kind:
		return fmt.Errorf("%w: its control frame has the type %d, not %d", errNoControl, got, kind)
	case kind == controlAccept && len(types) > 0 && !slices.Contains(types, contentType):
		return errContent
	}
	return nil
}
